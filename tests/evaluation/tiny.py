"""A tiny model in a folder and LongBench rows that it can be asked, for runs that take seconds."""

import json
import random

from cli.conftest import CONFIG, write_model

LETTERS = "the thin in the 12 "


def write_tiny(folder):
    """A tiny Llama of 2,048 positions with a chat template."""
    return write_model(folder, CONFIG)


def write_data(folder, *, rows=3, words=60):
    """LongBench rows of made-up text for two tasks."""
    rng = random.Random(5)
    path = folder / "longbench"
    path.mkdir(parents=True, exist_ok=True)
    for task in ("hotpotqa", "samsum"):
        lines = [
            {
                "input": f"what {index}?",
                "context": "".join(rng.choice("then hi12 ") for _ in range(words + 20 * index)),
                "answers": ["the", "12"],
                "length": 100,
                "all_classes": None,
            }
            for index in range(rows)
        ]
        (path / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
