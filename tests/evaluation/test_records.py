"""The run's folder: torn lines, two writers, and what may differ when a run is resumed."""

import json

import pytest

from inertiakv_jax.eval import records
from inertiakv_jax.eval.records import RecordFile


def line(example, variant="full"):
    return {"example": example, "variant": variant}


def test_records_come_back(tmp_path):
    with RecordFile(tmp_path / "records.jsonl") as file:
        file.append(line("a/0"))
        file.append(line("a/0", "lazy4") | {"text": "Grüße\u2028\n"})
    assert records.read_records(tmp_path) == [
        line("a/0"),
        line("a/0", "lazy4") | {"text": "Grüße\u2028\n"},
    ]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"example": "a/1", "varia', b'{"example": "\xc3'])
def test_torn_last_line_is_cut_off(tmp_path, torn):
    path = tmp_path / "records.jsonl"
    path.write_bytes(json.dumps(line("a/0")).encode() + b"\n" + torn)
    assert records.read_records(tmp_path) == [line("a/0")]
    with RecordFile(path) as file:
        assert file.done == {("a/0", "full")}
        file.append(line("a/1"))
    assert records.read_records(tmp_path) == [line("a/0"), line("a/1")]


def test_example_is_never_written_twice(tmp_path):
    with RecordFile(tmp_path / "records.jsonl") as file:
        file.append(line("a/0"))
        with pytest.raises(ValueError, match="has a/0 with full already"):
            file.append(line("a/0"))


def test_second_writer_is_refused(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "records.jsonl"
    with (
        RecordFile(path),
        pytest.raises(ValueError, match="another process is writing"),
        RecordFile(path),
    ):
        pass
    with RecordFile(path) as file:  # and has the file once the first is done
        file.append(line("a/0"))


@pytest.mark.parametrize("content", [b"[]\n", b'{"example": "a/0"}\n', b"no\n"])
def test_whole_line_that_is_no_record_is_named(tmp_path, content):
    (tmp_path / "records.jsonl").write_bytes(json.dumps(line("a/0")).encode() + b"\n" + content)
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2 is no record"):
        records.read_records(tmp_path)


def test_description_is_compared_but_for_its_title(tmp_path):
    first = {"settings": {"ratios": [0.9], "seed": 1}, "report": {"name": "a"}}
    records.start_or_resume(tmp_path, first)
    stored = (tmp_path / "run.json").read_bytes()
    records.start_or_resume(tmp_path, first | {"report": {"name": "b"}})
    assert (tmp_path / "run.json").read_bytes() == stored
    with pytest.raises(
        ValueError, match=r"settings\.seed: 1 there, 2 here\n  versions: None there"
    ):
        records.start_or_resume(
            tmp_path, {"settings": {"ratios": (0.9,), "seed": 2}, "versions": "x"}
        )


def test_records_without_a_description_are_refused(tmp_path):
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has records but no run\.json"):
        records.start_or_resume(tmp_path, {})
