"""Run as a script: SmolLM2 on each mesh named, against one device; what is equal, as JSON lines."""

import json
import sys

import numpy as np

import inertiakv_jax as ikv

PROMPTS = (
    "The history of Rome begins with a village on the Tiber. " * 4,
    "Rivers carry water from the mountains to the sea, and " * 3,
    "A list of prime numbers: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, ",
)


def run(mesh, policy):
    lm = ikv.load("smollm2-135m", mesh=mesh)
    out = ikv.generate(lm, PROMPTS, policy=policy, ratio=0.7, max_new_tokens=20)
    positions = np.asarray(out.state.positions)[: len(PROMPTS)]
    return out.tokens, positions.tolist(), out.stats.kept_tokens


def main():
    policy, *meshes = sys.argv[1:]
    expected = run(None, policy)
    for text in meshes:
        got = run(ikv.make_mesh(text), policy)
        equal = [a == b for a, b in zip(got, expected, strict=True)]
        result = {"mesh": text, "tokens": equal[0], "positions": equal[1], "kept": equal[2]}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
