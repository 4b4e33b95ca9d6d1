"""Run as a script, one process of a job: job.py COORDINATOR COUNT INDEX WHAT."""

import os
import signal
import sys

from inertiakv_jax.distributed import gather, join, together


def work(what: str, index: int) -> str:
    if what == "fail" and index == 1:
        raise ValueError("the data is not here")
    if what == "die" and index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"result {index}"


def main():
    coordinator, count, index, what = sys.argv[1:]
    join(coordinator, int(count), int(index), heartbeat_s=10)
    result = together(lambda: work(what, int(index)))
    sys.stdout.write("; ".join(gather(result)))


if __name__ == "__main__":
    main()
