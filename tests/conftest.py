"""Strict flags for every test, and the two things that tests may find outside the checkout."""

import os
from pathlib import Path

# Before jax is imported. The figures that tests expect are the CPU's, unless the caller asks for
# another device. One device: fake ones would share its threads, so sharding tests start a process
# of their own with eight.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# transformers asks the hub about folders, too; what a test sees must not depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ON_CI = os.environ.get("CI", "").lower() in ("1", "true")
ROOT = Path(__file__).parents[1]


def missing(what: str) -> None:
    """Skips the test, except on CI, where everything that tests need must be there."""
    if ON_CI:
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Each takes memory mappings, of which Linux lets a process have 65,530: then LLVM aborts."""
    yield
    jax.clear_caches()


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test's module compile anything
def pytest_runtest_setup(item):
    """Tiny models run for milliseconds and compile for seconds: without LLVM's costly passes."""
    as_for_users = ("real_weights", "aot", "optimized")
    quick = not any(map(item.get_closest_marker, as_for_users))
    jax.config.update("jax_disable_most_optimizations", quick)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))  # of processes it starts


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32, a LanguageModel."""
    import inertiakv_jax as ikv

    try:
        return ikv.load("smollm2-135m")
    except ConnectionError as error:
        return missing(f"smollm2-135m can't be had: {error}")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Benchmark data beside the checkout; it belongs to its authors and is no part of this."""
    folder = ROOT.parent / "shared"
    if not (folder / "data").is_dir():
        missing(f"no benchmark data beside the checkout ({folder.name}/data)")
    return folder
