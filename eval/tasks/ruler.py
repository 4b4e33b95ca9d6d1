"""RULER: thirteen tasks of any length, made for the model's own tokenizer.

Source: Hsieh et al. 2024, arXiv 2404.06654; NVIDIA/RULER ``scripts/synthetic.yaml``.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

from inertiakv_jax.eval import metrics
from inertiakv_jax.eval.tasks import ruler_lists, ruler_niah, ruler_qa
from inertiakv_jax.eval.tasks.ruler_text import Sample
from inertiakv_jax.eval.tasks.task import Example, Request, Scores, Task

SAMPLES = 500
"""Of a task and length, if the request does not say."""

Generator = Callable[[Request, int], Iterator[Sample]]

GENERATORS: dict[str, tuple[Generator, int]] = {
    name: (functools.partial(ruler_niah.samples, needles), ruler_niah.NEW_TOKENS)
    for name, needles in ruler_niah.TASKS.items()
} | {
    "vt": (ruler_lists.variable_tracking, ruler_lists.VT_NEW_TOKENS),
    "cwe": (ruler_lists.common_words, ruler_lists.CWE_NEW_TOKENS),
    "fwe": (ruler_lists.frequent_words, ruler_lists.FWE_NEW_TOKENS),
    "qa_1": (functools.partial(ruler_qa.samples, "squad"), ruler_qa.NEW_TOKENS),
    "qa_2": (functools.partial(ruler_qa.samples, "hotpotqa"), ruler_qa.NEW_TOKENS),
}
"""Task -> what draws its samples, and its generation length."""


def _examples(name: str, request: Request) -> list[Example]:
    generator, new_tokens = GENERATORS[name]
    found = []
    for length in request.lengths:
        drawn = itertools.islice(generator(request, length), request.samples or SAMPLES)
        try:
            samples = list(drawn)
        except ValueError as error:
            raise ValueError(f"RULER's {name} at {length} tokens: {error}") from error
        found += [
            Example(
                task=name,
                index=index,
                prompt=sample.prompt,
                answer_prefix=sample.answer_prefix,
                references=sample.answers,
                max_new_tokens=new_tokens,
                length=length,
            )
            for index, sample in enumerate(samples)
        ]
    return found


def _score(name: str, example: Example, prediction: str) -> Scores:
    part = name.startswith("qa_")
    metric = metrics.string_match_part if part else metrics.string_match_all
    return {metric.__name__: metric(prediction, example.references)}


TASKS = [
    Task(name, "ruler", functools.partial(_examples, name), functools.partial(_score, name))
    for name in GENERATORS
]
GROUPS = {
    "ruler": tuple(GENERATORS),
    "ruler-niah": tuple(ruler_niah.TASKS),
    # What needs no data: noise and needles for a haystack, and lists.
    "ruler-local": ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"),
}
