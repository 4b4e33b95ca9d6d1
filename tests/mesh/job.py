"""Run as a script, one process of a job: job.py COORDINATOR COUNT INDEX WHAT [FOLDER]."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from inertiakv_jax.distributed import fetch, gather, join, together


def work(what: str, index: int) -> str:
    if what == "fail" and index == 1:
        raise ValueError("the data is not here")
    if what == "die" and index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"result {index}"


def answer(folder: Path, mesh: str | None = None) -> dict:
    """Generate and evaluate with the model in ``folder``; the records go to folder/run."""
    import inertiakv_jax as ikv
    from inertiakv_jax.eval import runner
    from inertiakv_jax.eval.settings import Settings
    from inertiakv_jax.generation import CHUNK_STEPS

    lm = ikv.load(folder / "tiny", mesh=None if mesh is None else ikv.make_mesh(mesh))
    settings = Settings(
        model="tiny",
        tasks=("hotpotqa",),
        policies=("inertiakv",),
        ratios=(0.5,),
        batch=2,
        data_dir=str(folder),
    )
    runner.run(settings, lm, folder / "run")
    # As long as the examples, so that the programs are the same.
    prompts = [np.arange(330) % 7 + 3, np.arange(350) % 11 + 3]
    policy = ikv.policies.inertiakv(0.5)
    out = ikv.generate(lm, prompts, policy=policy, max_new_tokens=10, stop_at_eos=False)
    positions = fetch(out.state.positions)
    more = {"steps": CHUNK_STEPS, "limit": 1, "policy": policy, "mesh": lm.mesh}
    _, tokens = ikv.decode(lm.model, lm.params, out.state, np.array([5, 6]), **more)
    return {
        "tokens": [*out.tokens, fetch(tokens)[:, 0].tolist()],
        "kept": positions.tolist(),
        "evicted": list(out.stats.evicted),
        "in_place": [leaf.is_deleted() for leaf in (*out.state.keys, *out.state.values)],
    }


def main():
    coordinator, count, index, what, *folder = sys.argv[1:]
    join(coordinator, int(count), int(index), heartbeat_s=10)
    if what == "answer":
        said = json.dumps(answer(Path(*folder), "data=2,model=2"))
    else:
        result = together(lambda: work(what, int(index)))
        said = "; ".join(gather(result))
    sys.stdout.write(said)


if __name__ == "__main__":
    main()
