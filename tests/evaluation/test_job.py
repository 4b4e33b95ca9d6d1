"""A run that several processes share gives the file that one gives."""

import json

import pytest
from evaluation.conftest import needs
from evaluation.tiny import write_data, write_tiny
from mesh.processes import run_processes

import inertiakv_jax as ikv
from inertiakv_jax.eval import job, records, runner
from inertiakv_jax.eval.settings import Settings

needs("rouge")
OPTIONS = {"tasks": ("hotpotqa",), "policies": ("full", "inertiakv"), "ratios": (0.5,)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), rows=5)


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """The lines of one process, without what they cost."""
    folder = tmp_path_factory.mktemp("runs")
    settings = Settings(model=str(model), data_dir=str(data), **OPTIONS)
    runner.run(settings, ikv.load(model), folder)
    return timeless(folder)


def timeless(folder):
    (path,) = records.record_files(folder)
    assert path.name == "records.jsonl"
    lines = path.read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in lines]


def run(model, data, folder, count):
    def command(coordinator, index):
        return [
            *("-m", "inertiakv_jax", "eval", "--model", str(model), "--data-dir", str(data)),
            *("--tasks", "hotpotqa", "--policies", "full", "inertiakv", "--ratios", "0.5"),
            *("--coordinator", coordinator, "--num-processes", str(count)),
            *("--process-id", str(index), "--out", str(folder)),
        ]

    for done in run_processes(count, command):
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_four_processes(model, data, whole, tmp_path):
    run(model, data, tmp_path, 4)
    assert timeless(tmp_path) == whole


@pytest.mark.slow
def test_two_processes_go_on_where_three_stopped(model, data, whole, tmp_path):
    run(model, data, tmp_path, 1)
    (path,) = records.record_files(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    # Of five batches the first of three processes had done its first, the last half of its.
    (tmp_path / "records-0-of-3.jsonl").write_bytes(b"".join(lines[:2]))
    (tmp_path / "records-2-of-3.jsonl").write_bytes(lines[4] + lines[5][:20])
    run(model, data, tmp_path, 2)
    assert timeless(tmp_path) == whole
    assert set(lines[:2]) | {lines[4]} <= set(path.read_bytes().splitlines(keepends=True))


def test_one_process_puts_the_files_of_several_into_one(model, data, whole, tmp_path):
    settings = Settings(model=str(model), data_dir=str(data), **OPTIONS)
    lm = ikv.load(model)
    for shard in (0, 1):
        runner.run(settings, lm, tmp_path, shard=shard, shards=2)
    assert len(records.record_files(tmp_path)) == 2
    runner.run(settings, lm, tmp_path)
    assert timeless(tmp_path) == whole


def test_processes_with_other_data_are_refused(monkeypatch):
    mine = {"model": 1, "examples": 2, "report": 3}
    monkeypatch.setattr(job, "gather", lambda said: [said, said | {"examples": 4}])
    with pytest.raises(ValueError, match="process 1 has other examples than process 0"):
        job.check_alike(mine)
