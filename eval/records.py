"""A run's folder: what it is in run.json, and one JSON line per example and policy.

run.json is written before the first result and never changed. Lines are flushed to the disk one by
one, so that a machine that goes away loses at most the line it was writing; a torn last line is
cut off when the run is resumed.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from inertiakv_jax.files import make_folder

RUN, RECORDS = "run.json", "records*.jsonl"
NOT_COMPARED = "report"
"""What of run.json may differ when a run is resumed: its title, and numbers to show beside."""


def start_or_resume(folder: Path, description: Mapping[str, Any]) -> None:
    """Make the folder say what the run is; or check that it says the same already.

    Raises:
      ValueError: the folder cannot be made, or holds another run; the message names what differs.
    """
    make_folder(folder)
    path = folder / RUN
    if not path.exists():
        if any(folder.glob(RECORDS)):
            raise ValueError(f"{folder} has records but no {RUN}; choose another folder")
        _create(path, json.dumps(description, indent=1, ensure_ascii=False).encode() + b"\n")
    stored = read_description(folder)
    wanted = json.loads(json.dumps(description))
    for content in (stored, wanted):
        content.pop(NOT_COMPARED, None)
    differing = _differences(stored, wanted)
    if differing:
        raise ValueError(
            f"{folder} holds another run, which cannot be resumed as this one:\n  "
            + "\n  ".join(differing)
        )


def read_description(folder: Path) -> dict[str, Any]:
    """What run.json says.

    Raises:
      ValueError: there is none, or it is no JSON object.
    """
    path = folder / RUN
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{folder} is no run: it has no {RUN}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object")
    return content


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of a run, those of every shard, without a torn last line.

    Raises:
      ValueError: a line that is no record, or an example twice with different results.
    """
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for path in record_files(folder):
        for record in _whole_lines(path):
            key = record_key(record)
            if records.get(key, record) != record:
                raise ValueError(f"{path} has {key[0]} with {key[1]} twice")
            records[key] = record
    return list(records.values())


def record_files(folder: Path) -> list[Path]:
    """The files of a run's records, of which each host has one."""
    return sorted(folder.glob(RECORDS))


def record_key(record: Mapping[str, Any]) -> tuple[str, str]:
    """What a record is of: the example and the policy's label."""
    return record["example"], record["variant"]


class RecordFile:
    """A file of records, open for more. Only one process writes to it at a time.

    Attributes:
      done: keys of the records that it has.
    """

    def __init__(self, path: Path):
        """Open ``path``, cutting off a torn last line.

        Raises:
          ValueError: another process writes to it, or a line is no record.
        """
        self._path = path
        self._file = path.open("ab")
        try:
            _lock(self._file.fileno(), path)
            size = _whole_size(path)
            if size < path.stat().st_size:
                os.truncate(path, size)
            self.done = {record_key(record) for record in _whole_lines(path)}
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and wait until the disk has it."""
        key = record_key(record)
        if key in self.done:
            raise ValueError(f"{self._path} has {key[0]} with {key[1]} already")
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(key)

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def record_path(folder: Path, shard: int, shards: int) -> Path:
    """The file of one of several hosts that share a run."""
    name = "records.jsonl" if shards == 1 else f"records-{shard}-of-{shards}.jsonl"
    return folder / name


def write_as_one(folder: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Write the records of all hosts to one file, in one move, and remove the others."""
    whole = record_path(folder, 0, 1)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in found]
    temporary = whole.with_name(f".{whole.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, whole)
    finally:
        temporary.unlink(missing_ok=True)
    for path in record_files(folder):
        if path != whole:
            path.unlink()


def _whole_size(path: Path) -> int:
    content = path.read_bytes()
    return content.rfind(b"\n") + 1


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            hash(record_key(record))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no record: {error!r}") from error
        yield record


def _create(path: Path, content: bytes) -> None:
    """Write a file in one move, unless another process was first."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links: the last of several writers wins
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no POSIX: the user sees to it
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another process is writing {path}") from error
    except OSError:  # a file system without locks: likewise
        return


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], at: str = "") -> list[str]:
    found = []
    for key in dict.fromkeys([*stored, *wanted]):
        old, new = stored.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{at}{key}.")
        elif old != new:
            found.append(f"{at}{key}: {old!r:.120} there, {new!r:.120} here")
    return found
