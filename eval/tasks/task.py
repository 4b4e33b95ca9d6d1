"""What a benchmark task is: examples to ask, and how an answer is scored."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from inertiakv_jax.eval.sources import Sources

Truncation = Literal["halves", "ends"]
"""How a prompt that is too long loses its middle; see ``prompting.shortened``."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One question, ready for any model.

    Attributes:
      task: name of its task, as in results.
      index: place within the task (and length), from 0.
      prompt: what the user says.
      references: right answers.
      max_new_tokens: the task's generation length.
      answer_prefix: what the answer is made to begin with, after the chat template.
      chat: whether a model with a chat template gets it.
      length: nominal length in tokens of a generated example, prompt and answer; None for data
        that has its own.
      truncation: None for a prompt that must fit as it is.
      ends_line: whether a line break ends the answer, though not as its first token (LongBench's
        samsum).
      tags: what results are broken down by, like a needle's depth.
      classes: all labels of a classification task.
      second_prompt: of a task in two turns: asks for the answer once there are thoughts.
    """

    task: str
    index: int
    prompt: str
    references: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    chat: bool = True
    length: int | None = None
    truncation: Truncation | None = None
    ends_line: bool = False
    tags: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] = ()
    second_prompt: str = ""

    @property
    def group(self) -> str:
        """The task, with its length if it has one: what is averaged over."""
        return self.task if self.length is None else f"{self.task}@{self.length}"

    @property
    def key(self) -> str:
        """Unique within a run, like "vt@2048/3"."""
        return f"{self.group}/{self.index}"


@dataclasses.dataclass(frozen=True)
class Request:
    """What examples are wanted.

    Attributes:
      sources: where data comes from.
      count_tokens: length of a text in the model's tokens, without special ones.
      template_tokens: tokens that the chat template adds to a prompt; 0 without one.
      lengths: for generated tasks: prompt and answer, in tokens.
      samples: examples of a task (and length); None takes all, or 500 where they are generated.
      seed: of what is generated; 42 is the official one.
      haystack: of the needle grid: "essay" or "noise".
      depths: of the needle grid: places of the needle, percent.
    """

    sources: Sources
    count_tokens: Callable[[str], int]
    template_tokens: int = 0
    lengths: tuple[int, ...] = (4096,)
    samples: int | None = None
    seed: int = 42
    haystack: str = "essay"
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)


Scores = dict[str, float]
"""Metric -> score in [0, 1]; the first is the task's own."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A named task of a benchmark.

    Attributes:
      name: as on the command line and in results.
      benchmark: what its average belongs to.
      examples: makes them.
      score: of a prediction.
      follow_up: for an answer in two turns: the prompt that takes the answer out of the first.
    """

    name: str
    benchmark: str
    examples: Callable[[Request], list[Example]]
    score: Callable[[Example, str], Scores]
    follow_up: Callable[[Example, str], Example] | None = None


def limited(rows: Sequence, samples: int | None) -> Sequence:
    """The first ``samples`` rows, or all."""
    return rows if samples is None else rows[:samples]
