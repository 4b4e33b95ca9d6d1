"""Prefill and decode, timed for several contestants in turns."""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from inertiakv_jax.decoding import decode
from inertiakv_jax.generation import CHUNK_STEPS, held_tokens
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policies import Policy
from inertiakv_jax.prefilling import prefill
from inertiakv_jax.prose import planted_text


@dataclasses.dataclass(frozen=True)
class Run:
    """One prompt read and continued once.

    Attributes:
      prefill_s: seconds until the first token is chosen.
      first_step_s: seconds of decode step 1, which attends to the whole prompt and evicts.
      decode_s: seconds of the steps after it.
      tokens: token ids chosen, the prefill's first.
      held_tokens: tokens in the cache at the end; the mean over rankings, if a policy has several.
      cache_slots: tokens that the cache has room for then.
      kv_bytes: bytes of its buffers.
    """

    prefill_s: float
    first_step_s: float
    decode_s: float
    tokens: list[int]
    held_tokens: int
    cache_slots: int
    kv_bytes: int


class Contestant(Protocol):
    """Something that decodes greedily."""

    @property
    def name(self) -> str:
        """In tables."""
        ...

    @property
    def library(self) -> str:
        """Whose code runs."""
        ...

    def __call__(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """Read the prompt, take step 1 and then ``new_tokens`` steps; keep nothing."""
        ...


@dataclasses.dataclass(frozen=True)
class PolicyContestant:
    """This library with one policy, decoding in chunks as ``generate`` does."""

    lm: LanguageModel
    policy: Policy
    implementation: str | None = None
    """Of the kernels; see ``decode``."""
    library: str = "inertiakv-jax"

    @property
    def name(self) -> str:
        """The policy's."""
        return self.policy.name

    def __call__(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """See ``Contestant``."""
        model, params, policy = self.lm.model, self.lm.params, self.policy
        decode_chunk = functools.partial(
            decode,
            model,
            params,
            policy=policy,
            implementation=self.implementation,
            mesh=self.lm.mesh,
        )
        tokens, lengths = np.asarray([prompt], np.int32), np.asarray([len(prompt)], np.int32)
        clock = _Clock()
        state, logits = prefill(
            *(model, params, tokens, lengths, policy),
            max_new_tokens=new_tokens + 1,
            mesh=self.lm.mesh,
        )
        token = jax.block_until_ready(jax.numpy.argmax(logits, axis=-1))
        prefill_s = clock.lap()
        chosen = [int(token[0])]

        steps = 1 if policy.evicts else CHUNK_STEPS  # step 1 of an evicting policy is a program
        state, columns = decode_chunk(state, token, steps=steps, limit=1)
        token = jax.block_until_ready(columns)[:, 0]
        first_step_s = clock.lap()
        chosen.append(int(token[0]))

        clock.lap()
        for start in range(0, new_tokens, CHUNK_STEPS):
            limit = min(CHUNK_STEPS, new_tokens - start)
            state, columns = decode_chunk(state, token, steps=CHUNK_STEPS, limit=limit)
            token = columns[:, limit - 1]
            chosen += np.asarray(columns)[0, :limit].tolist()
        decode_s = clock.lap()
        return Run(
            prefill_s=prefill_s,
            first_step_s=first_step_s,
            decode_s=decode_s,
            tokens=chosen,
            held_tokens=round(held_tokens(state)[0]),
            cache_slots=state.num_slots,
            kv_bytes=state.kv_bytes(),
        )


class _Clock:
    def __init__(self):
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def prompt_of(lm: LanguageModel, num_tokens: int, seed: int = 0) -> list[int]:
    """Exactly ``num_tokens`` token ids of generated prose, the model's first token included."""
    wanted, ids = num_tokens, []
    while len(ids) < num_tokens:
        wanted += max(num_tokens // 10, 1)
        text = planted_text(wanted, seed, lambda part: len(lm.tokenizer(part)["input_ids"])).text
        ids = lm.tokenizer(text)["input_ids"]
    return list(ids[:num_tokens])


def take_turns(
    contestants: Sequence[Contestant],
    prompt: Sequence[int],
    *,
    new_tokens: int,
    repeats: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[list[Run]]:
    """Run every contestant once to warm up, then ``repeats`` times, one after the other.

    Turns, so that a machine that slows down slows all of them; each frees its cache before the
    next one begins.

    Returns:
      The runs of each contestant, the first one left out.
    """
    runs: list[list[Run]] = [[] for _ in contestants]
    for turn in range(repeats + 1):
        for contestant, done in zip(contestants, runs, strict=True):
            what = f"round {turn} of {repeats}" if turn else "warming up"
            on_progress(f"{what}: {contestant.name}")
            run = contestant(prompt, new_tokens)
            if turn:
                done.append(run)
    return runs


def cpu_threads() -> int:
    """CPUs this process may use: as many threads as XLA makes."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
