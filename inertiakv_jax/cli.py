"""The command line ``inertiakv``: one subcommand, one module of ``commands``."""

import contextlib
import functools
import io
import operator
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich.text import Text

from inertiakv_jax.commands import (
    bench,
    convert,
    demo,
    evaluate,
    generate,
    knobs,
    models,
    plan,
    report,
    trace,
    train_scorer,
)
from inertiakv_jax.commands.options import REGISTRY
from inertiakv_jax.commands.terminal import console

DESCRIPTION = """Decode long prompts with a KV cache that keeps what attention keeps.

inertiakv COMMAND --help explains a command, with examples.

Example:
  inertiakv demo
"""
DEBUG_VARIABLE = "INERTIAKV_DEBUG"

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

# What the library raises on purpose. All else is a mistake of ours and shows its traceback.
_EXIT_CODES = {
    ValueError: BAD_INPUT,
    ConnectionError: FAILURE,
    FloatingPointError: FAILURE,
    OSError: FAILURE,
    MemoryError: FAILURE,
}

COMMANDS = {
    "generate": (generate.Generate, generate.DESCRIPTION),
    "eval": (evaluate.Evaluate, evaluate.DESCRIPTION),
    "report": (report.Report, report.DESCRIPTION),
    "bench": (bench.Bench, bench.DESCRIPTION),
    "trace": (trace.Trace, trace.DESCRIPTION),
    "knobs": (knobs.Knobs, knobs.DESCRIPTION),
    "train-scorer": (train_scorer.TrainScorer, train_scorer.DESCRIPTION),
    "plan": (plan.Plan, plan.DESCRIPTION),
    "models": (models.Models, models.DESCRIPTION),
    "convert": (convert.Convert, convert.DESCRIPTION),
    "demo": (demo.Demo, demo.DESCRIPTION),
}
"""Name -> options, and the text of its help, whose first line stands in the list of commands."""

STYLE = (
    tyro.conf.FlagCreatePairsOff,  # --raw, and no --no-raw
    tyro.conf.DisallowNone,
    tyro.conf.PositionalMetavarFromFieldName,
)


def main() -> None:
    """Run the process's own arguments, keep compiled programs for the next time, and exit."""
    # Closed by the caller (>&-), Python has None there, which not everything can write to.
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an answer may have letters that it cannot show
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:], keep_programs=True))


def run(arguments: Sequence[str], *, keep_programs: bool = False) -> int:
    """Run one command line.

    Args:
      arguments: without the program's name.
      keep_programs: keep compiled programs in the user's cache folder, for this process and later
        ones.

    Returns:
      The exit code: 0, 2 for bad input, 1 for a failure, 130 if interrupted.

    Raises:
      SystemExit: ``--help`` (0), or arguments that cannot be parsed (2).
    """
    command = parse(arguments)
    try:
        if keep_programs:
            _keep_programs()
        command.run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has had enough
        _close_stdout()
        return FAILURE
    except KeyboardInterrupt:
        console().print("interrupted")
        return INTERRUPTED
    except tuple(_EXIT_CODES) as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        console().print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
        return next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
    return 0


def parse(arguments: Sequence[str]) -> Any:
    """The command that the arguments name, with its options.

    Raises:
      SystemExit: as ``run``.
    """
    named = next(iter(arguments), None)
    commands = []
    for name, (kind, text) in COMMANDS.items():
        # tyro has one text for the list of commands and for a command's own help.
        shown = text if name == named else text.splitlines()[0]
        commands.append(Annotated[kind, tyro.conf.subcommand(name, description=shown)])
    one_of_them: Any = functools.reduce(operator.or_, commands)
    return tyro.cli(
        one_of_them,
        prog="inertiakv",
        description=DESCRIPTION,
        args=arguments,
        config=STYLE,
        registry=REGISTRY,
    )


def _keep_programs() -> None:
    """Let jax keep compiled programs on disk, unless the user has told it where or not to."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    import jax

    from inertiakv_jax.weights.wheel_files import cache_folder

    folder = cache_folder() / "programs"
    with contextlib.suppress(OSError):  # a home that cannot be written to: compile every time
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _close_stdout() -> None:
    """Keep Python from complaining about the broken pipe once more, at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
