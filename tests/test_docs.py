"""Examples in docstrings and in the README run and print what they say."""

import doctest
import importlib
import re
import subprocess
import sys

import pytest
from package_tree import ROOT, package_modules

# __main__ runs the command line when imported.
MODULES = sorted(set(package_modules()) - {"inertiakv_jax.__main__"})
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("*.md"))
PAGES += sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))
# ```python runnable is run by the test below, plain ```python is only shown. A page's examples run
# one after another in one process, as a reader would type them.
RUNNABLE = re.compile(r"^```python runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(importlib.import_module(module), optionflags=flags)
    assert result.failed == 0


def runnable(page: str) -> list[str]:
    return RUNNABLE.findall((ROOT / page).read_text())


@pytest.mark.real_weights
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_page_examples(page, tmp_path, smollm2):
    script = tmp_path / "page.py"
    script.write_text("\n".join(runnable(page)))
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def links(page: str) -> list[str]:
    """Targets of the page's links inside the project, without anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    return [link.partition("#")[0] for link in found if not re.match(r"[a-z]+:|#", link)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    assert [link for link in links(page) if not (folder / link).exists()] == []
