"""What the commands share: where they print, and how they write files."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 132
"""Columns of a table that goes to a file or a pipe."""


def console(stream: TextIO | None = None) -> Console:
    """A console on ``stream``, standard error by default; text is printed as it is."""
    made = Console(file=stream or sys.stderr, markup=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED_WIDTH
    return made


def output_console() -> Console:
    """A console on standard output, for what the user asked for."""
    return console(sys.stdout)


def is_tenth(done: int, total: int) -> bool:
    """Whether another tenth of the way is done: when to print a line where there is no bar."""
    return done * 10 // total > (done - 1) * 10 // total


@contextlib.contextmanager
def progress(log: Console) -> Iterator[Callable[[str], None]]:
    """Give a function that says what is going on: a moving line on a terminal, lines elsewhere."""
    if not log.is_terminal:
        yield log.print
        return
    with log.status("") as status:
        yield status.update


def plain_table(**options) -> Table:
    """A table without frame: aligned columns under a line."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)


def check_output(option: str, path: Path) -> None:
    """Raise ValueError unless ``path`` can become a file; before a long run, not after it."""
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {path}")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{option} {path}: the folder {folder} {what}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: the folder {folder} is not writable")


def write_file(path: Path, content: bytes) -> None:
    """Write a file in one move, so that it never is half there."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        # mkstemp lets only the owner read; a new file of open() obeys the umask.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
