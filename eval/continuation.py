"""Answers of several policies to the same prompts, from one prefill where they prefill alike."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax.budget import kv_bytes_per_token, window_kv_bytes
from inertiakv_jax.decoding import NO_TOKEN, decode
from inertiakv_jax.distributed import fetch
from inertiakv_jax.generation import CHUNK_STEPS, check_finite, held_tokens, rows_done
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.observation import Observing
from inertiakv_jax.policies import full
from inertiakv_jax.policy import Policy
from inertiakv_jax.prefilling import ReadPrompts, full_slots, read_prompts, start
from inertiakv_jax.prompt_input import filled_up
from inertiakv_jax.prompt_thinning import observing_of
from inertiakv_jax.state import KVState
from inertiakv_jax.text import RowText, with_repetition

_Reading = tuple[Observing | None, int]


@dataclasses.dataclass(frozen=True)
class Request:
    """How answers are decoded, greedily.

    Attributes:
      max_new_tokens: longest answer.
      stop_tokens: ids that end it.
      not_first: ids that it may not begin with.
      stop: texts that end it and are no part of it.
      rows: a number for each row, which random evictions are drawn for; None counts them.
    """

    max_new_tokens: int
    stop_tokens: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    rows: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Answers:
    """What one policy answered, and what it cost. Lists have one entry a row.

    Attributes:
      texts: the answers, without special tokens.
      new_tokens: their lengths in tokens, a stop token included.
      prompt_tokens: lengths of the prompts.
      kept_tokens: tokens in the cache at the end; the mean where layers or heads differ.
      evicted: tokens evicted.
      kv_bytes_full: bytes of the keys and values of all tokens seen.
      kv_bytes_kept: bytes of those held at the end.
      kv_bytes_allocated: bytes of the cache's buffers at the end, all rows together.
      prefill_s: seconds of the prefill, compilation included; of a shared one, the same for all.
      prefill_shared: whether other policies went on from the same prefill.
      decode_s: seconds of the steps after step 1, all rows together, compilation excluded.
      decode_tokens: tokens of these steps, all rows together.
    """

    texts: list[str]
    new_tokens: list[int]
    prompt_tokens: list[int]
    kept_tokens: list[int]
    evicted: list[int]
    kv_bytes_full: list[int]
    kv_bytes_kept: list[int]
    kv_bytes_allocated: int
    prefill_s: float
    prefill_shared: bool
    decode_s: float
    decode_tokens: int


def answers(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy],
    request: Request,
) -> Iterator[Answers]:
    """Answer the prompts with each policy.

    The prompts are read once for all policies that read them alike. That cache stays until the
    last of them has started, so put these together, and the full cache last: it goes on in place,
    where it would be copied.

    Args:
      lm: the model.
      prompts: token ids of each row.
      policies: in the order in which they run.
      request: how answers end.

    Returns:
      The answers of each policy, in order, as they come.

    Raises:
      ValueError: as ``prefill``, before anything is compiled.
      FloatingPointError: logits held NaN or infinity.
    """
    tokens, lengths = _padded(prompts)
    policies = [with_repetition(policy, lm) for policy in policies]
    groups = [_reading(policy, lm, lengths, request) for policy in policies]
    read: dict[_Reading, _Read] = {}
    for index, (policy, group) in enumerate(zip(policies, groups, strict=True)):
        alike = [other for other, key in zip(policies, groups, strict=True) if key == group]
        if group not in read:
            read[group] = _read(lm, tokens, lengths, alike, request, group[1])
        last = group not in groups[index + 1 :]
        # The last to start from it may use it up.
        started = read.pop(group) if last else read[group]
        state = start(
            lm.model,
            lm.params,
            started.prompts,
            policy,
            max_new_tokens=request.max_new_tokens,
            donate=last,
        )
        shared = len(alike) > 1
        yield _continued(lm, started, state, policy, request, donate=last, shared=shared)


def _reading(policy: Policy, lm: LanguageModel, lengths: np.ndarray, request: Request) -> _Reading:
    """What tells two readings of the prompts apart: what is noted of them, and the cache's size.

    The size is that of the full policy at least, so that it, and with it the last digit of a
    result, does not depend on which policies run together.
    """
    sizes = (
        full_slots(lm.model, each, lengths, request.max_new_tokens) for each in (policy, full())
    )
    return observing_of(policy), max(sizes)


@dataclasses.dataclass(frozen=True)
class _Read:
    prompts: ReadPrompts
    first: Array  # [B] int32, tokens
    lengths: np.ndarray  # [B], of the prompts without the rows that fill up the mesh
    seconds: float


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lengths.max())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _read(lm, tokens, lengths, policies, request, slots) -> _Read:
    begin = time.perf_counter()
    filled = filled_up(tokens, lengths, lm.mesh)
    rows = request.rows
    if rows is not None:
        rows = np.pad(rows, (0, len(filled[1]) - len(rows)), "edge")
    prompts = read_prompts(
        lm.model,
        lm.params,
        *filled,
        policies,
        max_new_tokens=request.max_new_tokens,
        rows=rows,
        least_slots=slots,
        mesh=lm.mesh,
    )
    logits = prompts.logits
    if request.not_first:
        logits = logits.at[:, np.asarray(request.not_first)].set(-jnp.inf)
    first = jax.block_until_ready(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    check_finite(prompts.state)
    return _Read(prompts, first, lengths, time.perf_counter() - begin)


def _continued(
    lm: LanguageModel,
    read: _Read,
    state: KVState,
    policy: Policy,
    request: Request,
    *,
    donate: bool,
    shared: bool,
) -> Answers:
    lengths = read.lengths
    rows = [RowText(lm.tokenizer, request.stop) for _ in lengths]
    _push(rows, fetch(read.first)[:, None], request)
    state, seconds, timed = _decode(lm, state, read.first, rows, policy, request, donate)
    for row in rows:
        row.push((), end=True)
    model, seen = lm.model, fetch(state.next_position).astype(int)[: len(rows)]
    held = held_tokens(state)[: len(rows)]
    token_bytes = kv_bytes_per_token(model)
    window_bytes = np.asarray([window_kv_bytes(model, tokens) for tokens in seen.tolist()])
    return Answers(
        texts=[row.text for row in rows],
        new_tokens=[len(row.tokens) for row in rows],
        prompt_tokens=lengths.tolist(),
        kept_tokens=np.rint(held).astype(int).tolist(),
        evicted=(seen - np.rint(held).astype(int)).tolist(),
        kv_bytes_full=(seen * token_bytes + window_bytes).tolist(),
        kv_bytes_kept=np.rint(held * token_bytes + window_bytes).astype(int).tolist(),
        kv_bytes_allocated=state.kv_bytes(),
        prefill_s=read.seconds,
        prefill_shared=shared,
        decode_s=seconds,
        decode_tokens=timed,
    )


def _decode(
    lm: LanguageModel,
    state: KVState,
    token: Array,
    rows: list[RowText],
    policy: Policy,
    request: Request,
    donate: bool,
) -> tuple[KVState, float, int]:
    """Decode until all rows have ended: state, and seconds and tokens of the steps after step 1."""
    decoded = functools.partial(
        decode,
        lm.model,
        lm.params,
        policy=policy,
        stop_tokens=request.stop_tokens,
        mesh=lm.mesh,
    )
    remaining = request.max_new_tokens - 1
    seconds, timed, warm = 0.0, 0, False
    while remaining and not all(row.done for row in rows):
        state = dataclasses.replace(state, finished=rows_done(rows, state))
        step_one = state.kept_slots is not None
        steps = 1 if step_one else CHUNK_STEPS
        if not (step_one or warm):
            state, _ = decoded(state, token, steps=steps, limit=0, donate=donate)  # compiles
            donate, warm = True, True
        limit = min(steps, remaining)
        start = time.perf_counter()
        state, tokens = decoded(state, token, steps=steps, limit=limit, donate=donate)
        columns = fetch(tokens)[:, :limit]
        if not step_one:
            seconds += time.perf_counter() - start
            timed += int((columns != NO_TOKEN).sum())
        donate = True
        check_finite(state)
        remaining -= limit
        token = jnp.maximum(tokens[:, limit - 1], 0)
        _push(rows, columns, request)
    return state, seconds, timed


def _push(rows: list[RowText], columns: np.ndarray, request: Request) -> None:
    for row, tokens in zip(rows, columns[: len(rows)].tolist(), strict=True):
        tokens = [] if row.done else [token for token in tokens if token != NO_TOKEN]
        row.push(tokens)
        row.done = row.done or (bool(tokens) and tokens[-1] in request.stop_tokens)
