"""Start the processes of a job on this machine."""

import os
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        return bound.getsockname()[1]


def run_processes(count, command, *, timeout=300):
    """Run ``command(coordinator, index)`` of Python's arguments for each; their finished selves."""
    coordinator = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, *command(coordinator, index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for index in range(count)
    ]
    try:
        return [
            subprocess.CompletedProcess(process.args, process.returncode, out, err)
            for process in started
            for out, err in [process.communicate(timeout=timeout)]
        ]
    finally:
        for process in started:
            process.kill()
