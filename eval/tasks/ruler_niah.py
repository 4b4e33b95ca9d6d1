"""RULER's needles in a haystack: eight tasks of one generator (``niah.py``)."""

import dataclasses
import random
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from inertiakv_jax.eval.tasks import ruler_text
from inertiakv_jax.eval.tasks.ruler_text import Sample
from inertiakv_jax.eval.tasks.task import Request

NEW_TOKENS = 128
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} "
    "for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n{context}\nWhat is the special magic {kind} "
    "for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40))]
"""Percent of the essay's sentences before a needle."""


@dataclasses.dataclass(frozen=True)
class Needles:
    """A task: what the haystack is, what keys and values are, and how many of them there are."""

    haystack: str  # "noise", "essay", "needle"
    keys: str = "words"  # "words", "uuids"
    values: str = "numbers"  # "numbers", "uuids"
    num_keys: int = 1
    values_per_key: int = 1
    num_queries: int = 1

    @property
    def one_answer(self) -> bool:
        """Whether the prompt speaks of one value."""
        return self.num_queries * self.values_per_key == 1


TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", values_per_key=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
}


def samples(task: Needles, request: Request, length: int) -> Iterator[Sample]:
    """Draw samples of at most ``length`` tokens, the answer's included, without end.

    Raises:
      ValueError: the length has no room for the needles.
    """
    draw = _Draw(task, request, request.seed)
    step = 500 if task.haystack == "essay" else 5 if length < 4096 else 25
    room = length - request.template_tokens - NEW_TOKENS
    size = ruler_text.largest_size(
        draw,
        request.count_tokens,
        room,
        step=step,
        upper=lambda per_unit: int((length - request.template_tokens) / per_unit * 3),
    )
    while True:
        yield ruler_text.fitting_sample(
            draw,
            lambda sample: request.count_tokens(sample.text) <= room,
            size,
            step=step,
            smallest=task.num_keys * task.values_per_key,
        )


class _Draw:
    """Makes a sample with a haystack of a given size; carries the random stream."""

    def __init__(self, task: Needles, request: Request, seed: int):
        self._task = task
        self._seed = seed
        self._rng = ruler_text.generator(seed)
        self._essay = (
            ruler_text.essay_words(request.sources.essays()) if task.haystack == "essay" else ()
        )

    def __call__(self, size: int) -> Sample:
        task, rng = self._task, self._rng
        keys, values, needles = [], [], []
        for _ in range(task.num_keys):
            keys.append(self._draw(task.keys))
            values.append([self._draw(task.values) for _ in range(task.values_per_key)])
            needles += [self._needle(keys[-1], value) for value in values[-1]]
        random.Random(self._seed).shuffle(needles)
        context = self._in_essay(needles, size) if self._essay else self._in_lines(needles, size)
        asked = rng.sample(range(task.num_keys), task.num_queries)
        *most, last = [keys[place] for place in asked]
        query = ", ".join(most) + ", and " + last if most else last
        kind = task.values.removesuffix("s") if task.one_answer else task.values
        prompt, prefix = ONE if task.one_answer else MANY
        return Sample(
            prompt.format(kind=kind, context=context, query=query),
            prefix.format(kind=kind, query=query),
            tuple(value for place in asked for value in values[place]),
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self._task.values, key=key, value=value)

    def _draw(self, kind: str) -> str:
        draws: dict[str, Callable[[], str]] = {
            "numbers": lambda: str(self._rng.randint(1_000_000, 9_999_999)),
            "words": lambda: self._rng.choice(ruler_text.word_pairs()),
            "uuids": lambda: str(uuid.UUID(int=self._rng.getrandbits(128), version=4)),
        }
        return draws[kind]()

    def _in_essay(self, needles: list[str], size: int) -> str:
        """Needles between sentences of the first ``size`` words, the essays over and over."""
        words = self._essay * -(-size // len(self._essay))
        parts = ruler_text.sentences(" ".join(words[:size]).strip())
        depths = self._rng.sample(DEPTHS, len(needles))
        places = sorted(int(len(parts) * (depth / 100)) for depth in depths)
        found: list[str] = []
        for start, end, needle in zip([0, *places], places, needles, strict=False):
            found += [" ".join(parts[start:end]), needle]
        found.append(" ".join(parts[places[-1] :]))
        return " ".join(found)

    def _in_lines(self, needles: list[str], size: int) -> str:
        """Needles between ``size`` lines of noise, or of needles that nobody asks for."""
        task, rng = self._task, self._rng
        if task.haystack == "noise":
            lines = [ruler_text.NOISE] * size
        else:
            lines = [
                self._needle(self._draw(task.keys), self._draw(task.values)) for _ in range(size)
            ]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)
