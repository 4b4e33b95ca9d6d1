# make demo    answer a question about a long text with a full and with an evicted cache
# make test    run the tests              make test ARGS="-k scan -x" PEERS=1
# make lint    formatting, lint, types
# make format  rewrite files as `make lint` wants them
# make clean   remove everything that these commands made
#
# Each needs only Python >= 3.11 and make: it makes a virtual environment and installs what it uses.
#   PYTHON  the interpreter of that environment (python3)
#   VENV    its folder (.venv)
#   ARGS    passed on to the command
#   PEERS   1: also install the libraries that results are compared with (torch, kvpress); tests that
#           need them are skipped otherwise. On Linux pip's default torch is a CUDA build of several
#           GB; set PIP_EXTRA_INDEX_URL to PyTorch's CPU index to have the small one.
#   AOT     1: also install the compilers for TPUs and NVIDIA GPUs (about 500 MB), to compile the kernels
#           for machines that need not be there; these tests are skipped otherwise.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PEERS ?=
AOT ?=

BIN = $(VENV)/bin
comma := ,
TEST_EXTRAS = checkpoint,eval,test,train$(if $(filter 1,$(PEERS)),$(comma)peers)$(if $(filter 1,$(AOT)),$(comma)aot)
SOURCES = inertiakv_jax models eval pallas_kernels configs
TYPECHECK = build/typecheck/inertiakv_jax

.PHONY: demo test lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-core
	$(BIN)/inertiakv demo $(ARGS)

# In one process: jax compiles with all cores, and each further worker would compile everything again
# (two on two cores took twice the processor time).
test: $(VENV)/.installed-$(TEST_EXTRAS)
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# pyright does not know the editable install's import hook, so it gets the package as it is
	@# installed, one folder of links (folders are made: it does not look into linked ones).
	@rm -rf $(TYPECHECK)
	@find $(SOURCES) -name '*.py' | while read -r file; do \
	  link=$(TYPECHECK)/$${file#inertiakv_jax/}; \
	  mkdir -p "$$(dirname "$$link")" && ln -s "$(CURDIR)/$$file" "$$link" || exit 1; done
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 is needed, $(PYTHON) is not; choose one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras ("core": none), renewed when pyproject.toml changes.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.$(if $(filter-out core,$*),[$*])'
	@touch $@
