"""Processes of a job on one machine: they exchange results, share a model, and end together."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cli.conftest import CONFIG, write_model
from evaluation.conftest import needs
from evaluation.tiny import write_data
from mesh.job import answer
from mesh.processes import run_processes

import inertiakv_jax as ikv
from inertiakv_jax import distributed
from inertiakv_jax.eval import job, records

SCRIPT = Path(__file__).parent / "job.py"


def run(what, *folder, devices=1):
    def command(coordinator, index):
        return [str(SCRIPT), coordinator, "2", str(index), what, *map(str, folder)]

    return run_processes(2, command, devices=devices)


def test_results_come_in_the_order_of_the_processes():
    said = [done.stdout.splitlines()[-1] for done in run("work")]  # gloo writes there, too
    assert said == ["result 0; result 1"] * 2


def test_a_failure_is_everyones():
    first, second = run("fail")
    assert first.returncode == second.returncode == 1
    assert "process 1 of 2: ValueError: the data is not here" in first.stderr
    assert second.stderr.endswith("ValueError: the data is not here\n")


def test_a_killed_process_ends_the_job():
    first, second = run("die")
    assert second.returncode == -signal.SIGKILL
    assert first.returncode != 0
    assert "another task died" in first.stderr


def timeless(folder):
    """Records as written, without what they cost."""
    (path,) = records.record_files(folder / "run")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in one.items() if key != "cost"} for one in found]


def test_a_model_over_two_processes_answers_as_on_one_device(tmp_path):
    needs("rouge")
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        write_model(folder / "tiny", CONFIG | {"num_hidden_layers": 1})
        write_data(folder, rows=2)
    expected = answer(folders[0])
    for done in run("answer", folders[1], devices=2):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert min(expected["evicted"]) > 0
    assert all(expected["in_place"])
    assert timeless(folders[1]) == timeless(folders[0])


def as_process(monkeypatch, index, count, own):
    """Pretend to be one of several processes with ``own`` devices each."""
    devices = [SimpleNamespace(id=i, process_index=i // own) for i in range(count * own)]
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices[index * own :][:own])
    return devices


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(1, [8, 9, 10, 11]), (4, [8, 9, 10, 11]), (8, list(range(8, 16))), (16, list(range(16)))],
)
def test_a_mesh_takes_the_fewest_processes(needed, expected, monkeypatch):
    as_process(monkeypatch, index=2, count=4, own=4)
    assert [device.id for device in distributed.mesh_devices(needed)] == expected


@pytest.mark.parametrize("mesh", ["model=6", "model=12", "data=2,model=16"])
def test_a_mesh_of_parts_of_processes_or_groups_is_refused(mesh, monkeypatch):
    as_process(monkeypatch, index=0, count=4, own=4)
    message = "does not divide 4 processes of 4 devices each; expected at most 4, or 8 or 16"
    with pytest.raises(ValueError, match=message):
        ikv.make_mesh(mesh)


@pytest.mark.parametrize(
    ("members", "index", "expected"),
    [
        (1, 3, job.Share(3, 4, lockstep=False, writes=True)),
        (2, 2, job.Share(1, 2, lockstep=True, writes=True)),
        (2, 3, job.Share(1, 2, lockstep=True, writes=False)),
        (4, 3, job.Share(0, 1, lockstep=True, writes=False)),
    ],
)
def test_processes_of_a_mesh_share_a_part_that_one_writes(members, index, expected, monkeypatch):
    devices = as_process(monkeypatch, index, count=4, own=2)
    assert job.share_of(SimpleNamespace(devices=np.array(devices[: 2 * members]))) == expected


def test_alone_nothing_is_exchanged():
    assert distributed.gather({"a": [1]}) == [{"a": [1]}]
    assert distributed.together(lambda: 3) == 3
    with pytest.raises(KeyError, match="x"):
        distributed.together(lambda: {}["x"])


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("host:1",), {}, "needs coordinator, num_processes and process_id"),
        ((None, 2, 0), {}, "needs coordinator, num_processes and process_id"),
        (("host:1", 2, 2), {}, r"process_id must be in 0 \.\. 1, got 2"),
        (("host", 2, 0), {}, "coordinator must be host:port, got 'host'"),
        ((), {"JAX_COORDINATOR_ADDRESS": "host:1"}, "host:1, None and None"),
        (("host:1", 2), {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID must be a number, got 'one'"),
    ],
)
def test_half_a_job_is_refused(arguments, variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        distributed.join(*arguments)


def test_without_a_word_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    distributed.join()
