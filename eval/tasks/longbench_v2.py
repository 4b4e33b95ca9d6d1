"""LongBench-v2: 503 four-way questions on long texts, zero-shot and with chain of thought.

Prompts, generation lengths and the extraction of the answer are the official ones. Decoding is
greedy here; the official script samples at temperature 0.1. Source: Bai et al. 2024,
arXiv 2412.15204.
"""

import dataclasses
import functools
from typing import Any

from inertiakv_jax.eval import metrics
from inertiakv_jax.eval.tasks.task import Example, Request, Scores, Task, limited

_CHOICES = (
    "What is the correct answer to this question: $Q$\nChoices:\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n"
    "(D) $C_D$\n\n"
)
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'

ZERO_SHOT = (
    "Please read the following text and answer the question below.\n\n<text>\n$DOC$\n</text>\n\n"
    f"{_CHOICES}{_FORMAT}"
)
COT = (
    "Please read the following text and answer the questions below.\n\n<text>\n$DOC$\n</text>\n\n"
    f"{_CHOICES}Let’s think step by step:"
)
COT_ANSWER = (
    "Please read the following text and answer the questions below.\n\nThe text is too long and "
    f"omitted here.\n\n{_CHOICES}Let’s think step by step: $COT$\n\nBased on the above, what is "
    f"the single, most likely answer choice? {_FORMAT}"
)
NEW_TOKENS, COT_NEW_TOKENS = 128, 1024
ZERO_SHOT_TASK, COT_TASK = "longbench-v2", "longbench-v2-cot"

_FIELDS = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}


def filled(template: str, row: dict[str, Any]) -> str:
    """Put a row's texts into a template, one after another as the official script does."""
    for mark, field in _FIELDS.items():
        template = template.replace(mark, row[field].strip())
    return template


def _rows(request: Request) -> list[dict[str, Any]]:
    rows = list(limited(request.sources.longbench_v2(), request.samples))
    wanted = (*_FIELDS.values(), "answer", "difficulty", "length")
    for index, row in enumerate(rows):
        wrong = [field for field in wanted if not isinstance(row.get(field), str)]
        if wrong:
            raise ValueError(f"LongBench-v2, row {index}: {', '.join(wrong)} must be texts")
    return rows


def _example(task: str, index: int, row: dict[str, Any]) -> Example:
    cot = task == COT_TASK
    return Example(
        task=task,
        index=index,
        prompt=filled(COT if cot else ZERO_SHOT, row),
        references=(row["answer"],),
        max_new_tokens=COT_NEW_TOKENS if cot else NEW_TOKENS,
        truncation="ends",
        tags={"difficulty": row["difficulty"], "words": row["length"]},
        second_prompt=filled(COT_ANSWER, row) if cot else "",
    )


def _examples(task: str, request: Request) -> list[Example]:
    return [_example(task, index, row) for index, row in enumerate(_rows(request))]


def second_turn(example: Example, thoughts: str) -> Example:
    """The question, without the text, that takes the answer out of the thoughts."""
    prompt = example.second_prompt.replace("$COT$", thoughts.strip())
    return dataclasses.replace(example, prompt=prompt, max_new_tokens=NEW_TOKENS)


def _score(example: Example, prediction: str) -> Scores:
    return {"accuracy": float(metrics.choice_letter(prediction) == example.references[0])}


TASKS = [
    Task(ZERO_SHOT_TASK, ZERO_SHOT_TASK, functools.partial(_examples, ZERO_SHOT_TASK), _score),
    Task(
        COT_TASK,
        COT_TASK,
        functools.partial(_examples, COT_TASK),
        _score,
        follow_up=second_turn,
    ),
]
GROUPS: dict[str, tuple[str, ...]] = {}
