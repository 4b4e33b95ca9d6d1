"""Where benchmark data comes from: a local folder in the upstream formats, or the hub.

A local folder (``--data-dir``) is all that is looked at once it is named. It holds

    longbench/<task>.jsonl, longbench/<task>_e.jsonl     LongBench's data.zip, unpacked
    longbench-v2/data.json                               as on the hub
    ruler/PaulGrahamEssays.json                          as RULER's own scripts download them
    ruler/squad.json, ruler/hotpotqa.json                likewise

Nothing that is read is run: no pickle, no loading script.
"""

import dataclasses
import functools
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGBENCH = "zai-org/LongBench"
LONGBENCH_V2 = "zai-org/LongBench-v2"
ESSAYS = "baber/paul_graham_essays"
SQUAD = "rajpurkar/squad_v2"
HOTPOTQA = "hotpotqa/hotpot_qa"

MAX_BYTES = 4 * 2**30
"""Of one data file; the largest upstream, LongBench-v2's, has 0.5 GB."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """Benchmark data by its upstream name.

    Every method raises ValueError for a file that is missing or malformed, with its name, and
    ConnectionError where the hub is out of reach.

    Attributes:
      data_dir: the folder described above; None is the hub.
    """

    data_dir: Path | None = None

    def longbench(self, name: str) -> list[dict[str, Any]]:
        """Rows of a LongBench task ("hotpotqa", "hotpotqa_e"), in the upstream order."""
        if self.data_dir is not None:
            return _json_lines(self._file(f"longbench/{name}.jsonl"))
        archive = _from_hub(lambda: _hub_file(LONGBENCH, "data.zip"), LONGBENCH)
        with zipfile.ZipFile(archive) as files:
            member = files.getinfo(f"data/{name}.jsonl")
            _check_size(member.file_size, f"{archive}: {member.filename}")
            return _parsed_lines(files.read(member), f"{LONGBENCH}: {member.filename}")

    def longbench_v2(self) -> list[dict[str, Any]]:
        """The 503 questions."""
        if self.data_dir is not None:
            path = self._file("longbench-v2/data.json")
        else:
            path = _from_hub(lambda: _hub_file(LONGBENCH_V2, "data.json"), LONGBENCH_V2)
        return _json(path)

    def essays(self) -> str:
        """Paul Graham's essays, one text."""
        if self.data_dir is not None:
            content = _json(self._file("ruler/PaulGrahamEssays.json"))
            if not isinstance(content, dict) or not isinstance(content.get("text"), str):
                raise ValueError("ruler/PaulGrahamEssays.json must be an object with a text")
            return content["text"]
        rows = _hub_rows(ESSAYS, None, "train")
        return " ".join(row["text"] for row in rows)

    def squad(self) -> dict[str, Any]:
        """SQuAD 2.0's development set in its own JSON format."""
        if self.data_dir is not None:
            return _json(self._file("ruler/squad.json"))
        return squad_articles(_hub_rows(SQUAD, None, "validation"))

    def hotpotqa(self) -> list[dict[str, Any]]:
        """HotpotQA's development set, distractor setting, in its own JSON format."""
        if self.data_dir is not None:
            return _json(self._file("ruler/hotpotqa.json"))
        return [hotpot_question(row) for row in _hub_rows(HOTPOTQA, "distractor", "validation")]

    def _file(self, name: str) -> Path:
        assert self.data_dir is not None
        path = self.data_dir / name
        if not path.is_file():
            raise ValueError(f"the data folder {self.data_dir} has no {name}")
        return path


def squad_articles(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The hub's flat rows of SQuAD, put together to articles and paragraphs again."""
    articles: dict[str, dict[str, list]] = {}
    for row in rows:
        answers = [{"text": text} for text in row["answers"]["text"]]
        question = {
            "question": row["question"],
            "is_impossible": not answers,
            "answers": answers,
        }
        articles.setdefault(row["title"], {}).setdefault(row["context"], []).append(question)
    return {
        "data": [
            {"paragraphs": [{"context": text, "qas": qas} for text, qas in paragraphs.items()]}
            for paragraphs in articles.values()
        ]
    }


def hotpot_question(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the hub in HotpotQA's own format: lists of pairs instead of columns."""
    context, facts = row["context"], row["supporting_facts"]
    return {
        "question": row["question"],
        "answer": row["answer"],
        "context": list(map(list, zip(context["title"], context["sentences"], strict=True))),
        "supporting_facts": list(map(list, zip(facts["title"], facts["sent_id"], strict=True))),
    }


def _json_lines(path: Path) -> list[dict[str, Any]]:
    _check_size(path.stat().st_size, str(path))
    return _parsed_lines(path.read_bytes(), str(path))


def _parsed_lines(content: bytes, name: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: expected an object, got {line[:40]!r}")
        rows.append(row)
    return rows


@functools.lru_cache(maxsize=4)
def _json_at(path: Path, _modified: int) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def _json(path: Path) -> Any:
    """Read once for all tasks that use it."""
    status = os.stat(path)
    _check_size(status.st_size, str(path))
    return _json_at(path, status.st_mtime_ns)


def _check_size(size: int, name: str) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"{name} has {size} bytes, more than the {MAX_BYTES} that are read")


def _hub_file(repository: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, name, repo_type="dataset"))


@functools.lru_cache(maxsize=4)
def _hub_rows(repository: str, configuration: str | None, split: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{repository} needs the package datasets: pip install 'inertiakv-jax[eval]', "
            "or give a folder with --data-dir"
        ) from error

    def read() -> list[dict[str, Any]]:
        return load_dataset(repository, configuration, split=split).to_list()

    return _from_hub(read, repository)


def _from_hub(fetch: Callable[[], Any], repository: str) -> Any:
    try:
        return fetch()
    except Exception as error:  # the HTTP libraries' own errors differ between versions
        raise ConnectionError(
            f"cannot read {repository} from the hub ({type(error).__name__}: {error}); "
            "--data-dir names a folder with a copy"
        ) from error
