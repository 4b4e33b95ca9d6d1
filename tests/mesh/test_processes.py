"""Processes of a job on one machine: they exchange results, and none waits for one that is gone."""

import signal
from pathlib import Path

import pytest
from mesh.processes import run_processes

from inertiakv_jax import distributed

SCRIPT = Path(__file__).parent / "job.py"


def run(what):
    return run_processes(2, lambda coordinator, i: [str(SCRIPT), coordinator, "2", str(i), what])


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
