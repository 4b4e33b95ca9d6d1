"""Start the processes of a job on this machine."""

import os
import socket
import subprocess
import sys

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def free_port():
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        return bound.getsockname()[1]


def run_processes(count, command, *, devices=1, timeout=300):
    """Run ``command(coordinator, index)`` of Python's arguments for each; their finished selves.

    Each has so many devices that are none, and does not optimise what it compiles for them.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": QUICK_TO_COMPILE,
    }
    coordinator = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, *command(coordinator, index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
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
