"""Text in, text out: prompts to continuations, whole or as a stream."""

import dataclasses
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax import policies
from inertiakv_jax.attention import check_implementation
from inertiakv_jax.budget import window_kv_bytes
from inertiakv_jax.decoding import NO_TOKEN, decode
from inertiakv_jax.distributed import fetch
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policies import Policy
from inertiakv_jax.prefilling import prefill
from inertiakv_jax.prompt_input import check_lengths, filled_up
from inertiakv_jax.sampling import Sampling, check_sampling, sample
from inertiakv_jax.sharding import check_mesh
from inertiakv_jax.state import KVState
from inertiakv_jax.text import Prompt, RowText, encode_prompts, with_repetition

CHUNK_STEPS = 16
"""Decode steps between two looks at the tokens, for stop strings and streaming."""


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """What a run cost. Sequences have one entry a row.

    Attributes:
      prompt_tokens: T of each row.
      new_tokens: tokens generated, a stop token included.
      kept_tokens: tokens in the cache at the end; the mean, rounded, where layers or heads keep
        different numbers. Of layers without a sliding window.
      evicted: tokens evicted: all seen but those kept.
      kv_bytes_full: bytes of keys and values of all tokens seen, all rows: the full cache. A layer
        with a sliding window counts with what its window holds.
      kv_bytes_kept: bytes of those held at the end, likewise.
      kv_bytes_allocated: bytes of the cache's buffers at the end, free slots included.
      prefill_s: seconds from prompts to first token; the first run of a bucket compiles in it.
      decode_tokens_per_s: all rows together, steps after the first, compilation excluded; 0 if
        there were none.
    """

    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    kept_tokens: tuple[int, ...]
    evicted: tuple[int, ...]
    kv_bytes_full: int
    kv_bytes_kept: int
    kv_bytes_allocated: int
    prefill_s: float
    decode_tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """What ``generate`` returns.

    Attributes:
      texts: continuation of each row, without special tokens, cut before a stop string.
      tokens: token ids of each row, a stop token included.
      stats: what it cost.
      state: the cache at the end, for a look at what was kept. Behind the prompts' rows may come
        others, which were added for the axis "data" of the mesh to divide them.
    """

    texts: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    state: KVState = dataclasses.field(repr=False)


def generate(lm: LanguageModel, prompts: Sequence[Prompt], **options: Any) -> GenerationOutput:
    """Continue a batch of prompts.

    Rows may have any lengths; each has its own budget. Greedy decoding gives a row the tokens it
    gives alone.

    Args:
      lm: from ``load``.
      prompts: at least one text, chat or list of token ids.
      **options: as of ``stream``.

    Returns:
      Texts, tokens, statistics and the final cache.

    Raises:
      ValueError: as ``stream``, before anything is compiled.
      FloatingPointError: the logits of a row held NaN or infinity.

    Example::

        lm = ikv.load("smollm2-135m")
        out = ikv.generate(lm, ["Once upon a time"], policy="lazy4", ratio=0.9)
        print(out.texts[0], out.stats.kept_tokens)
    """
    chunks = stream(lm, prompts, **options)
    while True:
        try:
            next(chunks)
        except StopIteration as stop:
            return stop.value


def stream(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    policy: str | Policy = "inertiakv",
    ratio: float | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_at_eos: bool = True,
    answer_prefix: str = "",
    implementation: str | None = None,
) -> Generator[list[str], None, GenerationOutput]:
    """Continue a batch of prompts, yielding text as it is decoded.

    Args:
      lm: from ``load``.
      prompts: at least one text, chat or list of token ids.
      policy: a name of ``policies.NAMES`` or a ``Policy``.
      ratio: fraction of the prompt's cache removed, with a policy's name; 0.9 if None.
      max_new_tokens: tokens to generate for a row, at least 1.
      sampling: None is greedy.
      seed: of the sampling.
      stop: strings that end a row; not part of its text.
      stop_at_eos: whether the model's end tokens end a row.
      answer_prefix: text the answer is made to begin with; appended to every prompt.
      implementation: of the attention kernel; see ``decode``.

    Returns:
      A generator that yields the new text of each row since the last time, possibly "", and
      whose value, once it is exhausted, is the output of ``generate``.

    Raises:
      ValueError: an empty batch or prompt, an unknown policy, a number out of range, a prompt
        beyond the model's positions, or a chat without a template; before anything is compiled.
      FloatingPointError: the logits of a row held NaN or infinity (from the generator).
    """
    policy = with_repetition(_resolve_policy(policy, ratio), lm)
    check_mesh(lm.mesh)
    check_sampling(sampling)
    check_implementation(implementation)
    if sampling is not None:
        _check_seed(seed)
    stop = _checked_stop(stop)
    if not isinstance(answer_prefix, str):
        raise ValueError(f"answer_prefix must be a text, got {answer_prefix!r}")
    ids = encode_prompts(lm, prompts, answer_prefix)
    lengths = np.asarray([len(row) for row in ids], np.int32)
    check_lengths(lm.model, lengths, _required(max_new_tokens))
    policy.budgets(lengths, lm.model)
    policy.knobs(lm.model)  # refuses weights of another model
    padded = np.zeros((len(ids), int(lengths.max())), np.int32)
    for row, row_ids in zip(padded, ids, strict=True):
        row[: len(row_ids)] = row_ids
    run = _Run(
        lm=lm,
        policy=policy,
        sampling=sampling,
        key=None if sampling is None else jax.random.key(seed),
        stop_tokens=tuple(lm.eos_token_ids) if stop_at_eos else (),
        implementation=implementation,
        rows=[RowText(lm.tokenizer, stop) for _ in ids],
    )
    return run.stream(padded, lengths, max_new_tokens)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One generation: what stays the same from chunk to chunk, and the rows' texts."""

    lm: LanguageModel
    policy: Policy
    sampling: Sampling | None
    key: Array | None
    stop_tokens: tuple[int, ...]
    implementation: str | None
    rows: list[RowText]

    def stream(
        self, prompts: np.ndarray, lengths: np.ndarray, max_new_tokens: int
    ) -> Generator[list[str], None, GenerationOutput]:
        start = time.perf_counter()
        state, logits = prefill(
            self.lm.model,
            self.lm.params,
            *filled_up(prompts, lengths, self.lm.mesh),
            self.policy,
            max_new_tokens=max_new_tokens,
            mesh=self.lm.mesh,
        )
        token = sample(logits, self.sampling, self.key, state.step)
        check_finite(state)
        first = fetch(token)[:, None]
        prefill_s = time.perf_counter() - start
        yield self._push(first)

        remaining, timed_tokens, timed_s, warm = max_new_tokens - 1, 0, 0.0, False
        while remaining and not all(row.done for row in self.rows):
            state = dataclasses.replace(state, finished=rows_done(self.rows, state))
            step_one = state.kept_slots is not None
            if not (step_one or warm):
                state, _ = self._decode(state, token, CHUNK_STEPS, 0)  # compiles
                warm = True
            steps = 1 if step_one else CHUNK_STEPS
            limit = min(steps, remaining)
            start = time.perf_counter()
            state, tokens = self._decode(state, token, steps, limit)
            columns = fetch(tokens)[:, :limit]
            if not step_one:
                timed_s += time.perf_counter() - start
                timed_tokens += int((columns != NO_TOKEN).sum())
            check_finite(state)
            remaining -= limit
            token = jnp.maximum(tokens[:, limit - 1], 0)
            yield self._push(columns)
        yield [row.push((), end=True) for row in self.rows]
        rate = timed_tokens / timed_s if timed_s else 0.0
        return self._output(state, lengths, prefill_s, rate)

    def _decode(self, state, token, steps, limit):
        return decode(
            self.lm.model,
            self.lm.params,
            state,
            token,
            steps=steps,
            limit=limit,
            policy=self.policy,
            sampling=self.sampling,
            key=self.key,
            stop_tokens=self.stop_tokens,
            implementation=self.implementation,
            mesh=self.lm.mesh,
        )

    def _push(self, columns: np.ndarray) -> list[str]:
        """Hand [B, steps] tokens to the rows; a row is done at its stop token."""
        texts = []
        columns = columns[: len(self.rows)]
        for row, tokens in zip(self.rows, columns.tolist(), strict=True):
            tokens = [] if row.done else [token for token in tokens if token != NO_TOKEN]
            texts.append(row.push(tokens))
            row.done = row.done or (bool(tokens) and tokens[-1] in self.stop_tokens)
        return texts

    def _output(
        self, state: KVState, lengths: np.ndarray, prefill_s: float, rate: float
    ) -> GenerationOutput:
        model = self.lm.model
        seen = fetch(state.next_position)[: len(lengths)]
        held = held_tokens(state)[: len(lengths)]
        kept = np.rint(held).astype(int)
        token_bytes = policies.kv_bytes_per_token(model)
        window_bytes = sum(window_kv_bytes(model, tokens) for tokens in seen.tolist())
        stats = GenerationStats(
            prompt_tokens=tuple(lengths.tolist()),
            new_tokens=tuple(len(row.tokens) for row in self.rows),
            kept_tokens=tuple(kept.tolist()),
            evicted=tuple((seen - kept).tolist()),
            kv_bytes_full=int(seen.sum()) * token_bytes + window_bytes,
            kv_bytes_kept=round(held.sum() * token_bytes) + window_bytes,
            kv_bytes_allocated=state.kv_bytes(),
            prefill_s=prefill_s,
            decode_tokens_per_s=rate,
        )
        return GenerationOutput(
            texts=[row.text for row in self.rows],
            tokens=[row.tokens for row in self.rows],
            stats=stats,
            state=state,
        )


def rows_done(rows: Sequence[RowText], state: KVState) -> Array:
    """[B] bool for ``KVState.finished``: the rows that are done, and those that were added."""
    done = np.ones(state.finished.shape, np.bool_)
    done[: len(rows)] = [row.done for row in rows]
    return jnp.asarray(done)


def held_tokens(state: KVState) -> np.ndarray:
    """[B] float64, tokens held: the mean over rankings, [B], [E, B] or [E, B, K]."""
    held = fetch(state.num_held).astype(np.float64)
    rows = held.ndim // 2
    return held.mean(axis=tuple(axis for axis in range(held.ndim) if axis != rows))


def _resolve_policy(policy: str | Policy, ratio: float | None) -> Policy:
    if isinstance(policy, str):
        return policies.by_name(policy, ratio=ratio)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be a name or a Policy, got {policy!r}")
    if ratio is not None:
        raise ValueError(f"ratio={ratio} is set by the policy given, {policy}")
    return policy


def _required(max_new_tokens: int) -> int:
    if max_new_tokens is None:  # what prefill takes
        raise ValueError("max_new_tokens must be an integer, got None")
    return max_new_tokens


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an integer of 64 bits, got {seed!r}")


def _checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        raise ValueError(f"stop must be a list of strings, got one string; write [{stop!r}]")
    if not isinstance(stop, Iterable):
        raise ValueError(f"stop must be a list of strings, got {stop!r}")
    stop = tuple(stop)
    if any(not isinstance(s, str) or not s for s in stop):
        raise ValueError(f"stop must hold non-empty strings, got {list(stop)!r}")
    return stop


def check_finite(state: KVState) -> None:
    """Raise FloatingPointError if logits of a row held NaN or infinity."""
    broken = np.flatnonzero(~fetch(state.finite))
    if broken.size:
        raise FloatingPointError(
            f"the logits of rows {broken.tolist()} hold NaN or infinity after "
            f"{fetch(state.next_position)[broken].tolist()} tokens; are the weights sound, "
            "and does the dtype reach?"
        )
