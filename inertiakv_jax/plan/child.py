"""The process of its own that compiles: ``run_plan`` starts it, ``python -m`` is it.

The compilers read environment variables when they load, take the machine's TPU or GPU for
themselves, and may abort the process: none of that must reach the one that the user started.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inertiakv_jax.plan.chips import CHIPS, GPU, TPU
from inertiakv_jax.plan.request import Request

# JAX_PLATFORMS=cpu leaves accelerators alone, and turns off the CUDA plugin's search for a driver.
# The rest is for libtpu: it asks the cloud's metadata server about the machine unless it is told,
# and takes a lock that another process, or a program on a real TPU, may hold.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
COMPILERS = {
    TPU: ("libtpu",),
    GPU: ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"),
}
INSTALL = "pip install 'inertiakv-jax[aot]'"
ERRORS = {kind.__name__: kind for kind in (ValueError, ConnectionError)}
SHOWN = 4000  # characters of what a process wrote before it died
SAYS = "plan: "
"""What lines begin with that are for the user; the compilers write others."""


def check_compilers(topology: str) -> None:
    """Raise ValueError unless the compilers for a topology, or a search's chips, are there."""
    names = [part.split(":")[0] for part in topology.lower().split(",") if part] or list(CHIPS)
    for platform in dict.fromkeys(CHIPS[name].platform for name in names if name in CHIPS):
        for package in COMPILERS[platform]:
            try:
                found = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                raise ValueError(
                    f"compiling for {topology or 'all chips'} needs {package}: {INSTALL}"
                ) from None
            if package.startswith("jax-") and found != importlib.metadata.version("jax"):
                raise ValueError(
                    f"{package} {found} is not of the version of jax, "
                    f"{importlib.metadata.version('jax')}: {INSTALL}"
                )


def run_plan(request: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """Make the plan in a process of its own.

    Args:
      request: what to plan.
      say: told how far it is.

    Raises:
      ValueError: as ``planning.make_plan``, or a compiler that is not installed.
      ConnectionError: likewise.
      OSError: the process died; with the end of what it wrote.
    """
    check_compilers(request.topology)
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder, "plan.json")
        with subprocess.Popen(
            [sys.executable, "-m", "inertiakv_jax.plan.child", str(result_file)],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child:
            written = _talk(child, json.dumps(dataclasses.asdict(request)), say)
        if child.returncode or not result_file.exists():
            raise OSError(
                f"the compiler ended with exit code {child.returncode}:\n{written[-SHOWN:]}"
            )
        result = json.loads(result_file.read_text())
    if "error" in result:
        raise ERRORS[result["error"]](result["message"])
    return result


def _talk(child: subprocess.Popen[str], request: str, say: Callable[[str], None]) -> str:
    """Hand over the request; pass on what the child says, and return what else it wrote."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it died already, and has written why
            child.stdin.write(request)
            child.stdin.close()
        other = []
        for line in child.stdout:
            if line.startswith(SAYS):
                say(line.removeprefix(SAYS).rstrip())
            else:
                other.append(line)
        return "".join(other)
    except BaseException:
        child.kill()
        raise


def _main(result_file: str) -> None:
    from inertiakv_jax.plan.planning import make_plan

    def say(sentence: str) -> None:
        sys.stdout.write(f"{SAYS}{sentence}\n")
        sys.stdout.flush()

    request = Request(**json.loads(sys.stdin.read()))
    try:
        result = make_plan(request, say)
    except tuple(ERRORS.values()) as error:
        kind = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
        result = {"error": kind, "message": str(error)}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
