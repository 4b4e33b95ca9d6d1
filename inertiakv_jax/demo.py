"""One question about a long text, answered with the full cache and with evicted ones."""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array

from inertiakv_jax.decoding import decode
from inertiakv_jax.generation import CHUNK_STEPS, held_tokens
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policies import Policy
from inertiakv_jax.prefilling import prefill
from inertiakv_jax.prose import PlantedText
from inertiakv_jax.state import KVState

STEPS = 48
"""Decode steps that are watched; the answer takes about ten of them."""

TIMED_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt in tokens, with the places of what it asks for.

    Attributes:
      token_ids: the prompt, answer's beginning included.
      token_texts: the piece of text of each token.
      number: the right answer.
      number_positions: positions of the tokens that hold it, counted from 0.
    """

    token_ids: list[int]
    token_texts: list[str]
    number: str
    number_positions: range


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one policy answered, and what it kept while doing so.

    Attributes:
      policy: the policy.
      text: the answer, up to the model's end token.
      right: whether the first number in it is the one asked for.
      steps: decode steps until the end token was chosen; STEPS if it was not.
      kept_tokens: tokens in the cache after the last step watched; the mean over rankings, if
        the policy has several.
      kv_bytes: bytes of the cache's buffers then.
      held: [STEPS + 1, T + STEPS] bool; row t: which positions are in the cache after decode
        step t. Row 0 is the prompt.
      decode_tokens_per_s: median over rounds in which the policies took turns; nothing compiles
        in them.
    """

    policy: Policy
    text: str
    right: bool
    steps: int
    kept_tokens: int
    kv_bytes: int
    held: np.ndarray
    decode_tokens_per_s: float = 0.0


def pose(lm: LanguageModel, planted: PlantedText) -> Question:
    """Put the question in the model's chat template, if it has one, and begin the answer."""
    chat = bool(lm.tokenizer.chat_template)
    if chat:
        text = lm.chat_prompt([{"role": "user", "content": planted.request}])
    else:
        text = planted.request + "\n"
    text += planted.answer_prefix
    encoded = lm.tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
    first = text.index(planted.number)
    last = first + len(planted.number)
    spans = encoded["offset_mapping"]
    inside = [i for i, (start, end) in enumerate(spans) if start < last and end > first]
    return Question(
        token_ids=list(encoded["input_ids"]),
        token_texts=[text[start:end] for start, end in spans],
        number=planted.number,
        number_positions=range(inside[0], inside[-1] + 1),
    )


def compare(
    lm: LanguageModel,
    question: Question,
    policies: Sequence[Policy],
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Answer]:
    """Answer one question with each policy, then time them in turns.

    Args:
      lm: from ``load``; a mesh of it divides no rows, for there is one.
      question: from ``pose``.
      policies: all of them, the full cache among them or not.
      on_progress: told what is going on, as a line of text.

    Returns:
      An answer for each policy, in their order.

    Raises:
      ValueError: the prompt and the steps exceed the model's positions.
    """
    answers, runs = [], []
    for policy in policies:
        on_progress(f"{policy.name}: reading {len(question.token_ids):,} tokens, answering")
        answer, state, token = watch(lm, question, policy)
        answers.append(answer)
        runs.append(_Timing(lm, policy, state, token))
    on_progress("timing the policies in turns")
    rates = [[] for _ in runs]
    for _ in range(TIMED_ROUNDS):
        for run, found in zip(runs, rates, strict=True):
            found.append(run.tokens_per_s())
    return [
        dataclasses.replace(answer, decode_tokens_per_s=statistics.median(found))
        for answer, found in zip(answers, rates, strict=True)
    ]


def watch(lm: LanguageModel, question: Question, policy: Policy) -> tuple[Answer, KVState, Array]:
    """Decode greedily step by step, noting what is held after each.

    Decoding goes on behind the model's end token, so that all policies are watched equally long.

    Returns:
      The answer; the state after the last step and its token, to go on from.
    """
    length = len(question.token_ids)
    state, logits = prefill(
        lm.model,
        lm.params,
        np.asarray([question.token_ids], np.int32),
        np.asarray([length], np.int32),
        policy,
        max_new_tokens=STEPS + TIMED_ROUNDS * CHUNK_STEPS,
        mesh=lm.mesh,
    )
    token = jax.numpy.argmax(logits, axis=-1)
    held = np.zeros((STEPS + 1, length + STEPS), np.bool_)
    held[0, :length] = True
    tokens = [int(token[0])]
    for row in held[1:]:
        state, token = _step(lm, policy, state, token)
        row[np.asarray(state.positions)[np.asarray(state.valid)]] = True
        tokens.append(int(token[0]))
    ends = [index for index, token_id in enumerate(tokens) if token_id in lm.eos_token_ids]
    taken = ends[0] if ends else len(tokens)
    text = lm.tokenizer.decode(tokens[:taken], skip_special_tokens=True).strip()
    answer = Answer(
        policy=policy,
        text=text,
        right=is_right(text, question.number),
        steps=min(taken, STEPS),
        kept_tokens=round(held_tokens(state)[0]),
        kv_bytes=state.kv_bytes(),
        held=held,
    )
    return answer, state, token


def is_right(answer: str, number: str) -> bool:
    """Whether the first number in an answer is the one asked for."""
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == number


def one_line(text: str) -> str:
    """The text without line breaks, and without what would move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _step(lm: LanguageModel, policy: Policy, state: KVState, token: Array) -> tuple[KVState, Array]:
    """One step, by the program that takes ``CHUNK_STEPS``: so that timing compiles nothing."""
    steps = CHUNK_STEPS if state.kept_slots is None else 1
    state, tokens = decode(
        lm.model, lm.params, state, token, steps=steps, limit=1, policy=policy, mesh=lm.mesh
    )
    return state, tokens[:, 0]


class _Timing:
    """A run that goes on from where it was left, some steps at a time."""

    def __init__(self, lm: LanguageModel, policy: Policy, state: KVState, token: Array):
        self._lm, self._policy, self._state, self._token = lm, policy, state, token

    def tokens_per_s(self) -> float:
        """Take ``CHUNK_STEPS`` steps."""
        start = time.perf_counter()
        self._state, tokens = decode(
            self._lm.model,
            self._lm.params,
            self._state,
            self._token,
            steps=CHUNK_STEPS,
            policy=self._policy,
            mesh=self._lm.mesh,
        )
        tokens.block_until_ready()
        seconds = time.perf_counter() - start
        self._token = tokens[:, -1]
        return CHUNK_STEPS / seconds
