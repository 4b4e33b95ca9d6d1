"""Read the prompt into a full KV cache, chunk by chunk; nothing is scored or evicted here."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from inertiakv_jax import state as kv_state
from inertiakv_jax.attention import ring_positions
from inertiakv_jax.observation import Observed, nothing_observed
from inertiakv_jax.policy import Policy, check_policy
from inertiakv_jax.prefill_attention import PrefillCache
from inertiakv_jax.prompt_input import checked_prompts, checked_rows, is_prompt
from inertiakv_jax.prompt_thinning import observing_of, rank, thin_out_prompt
from inertiakv_jax.sharding import CONTEXT, TOKENS, check_batch, layout, place
from inertiakv_jax.state import KVState
from inertiakv_jax.typing import Model, Params, check_model

CHUNK = 256
"""Prompt tokens per forward; a shorter prompt takes smaller chunks. No effect on results."""


def prefill(
    model: Model,
    params: Params,
    tokens: Array | np.ndarray,
    lengths: Array | np.ndarray,
    policy: Policy,
    *,
    max_new_tokens: int | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    mesh: Mesh | None = None,
) -> tuple[KVState, Array]:
    """Run the prompts through the model and keep every key and value.

    Memory grows linearly with T: chunks of the prompt attend to blocks of keys, and no T x T
    array exists. Programs are shared by prompts of one capacity bucket, whatever their lengths,
    and by all decode-time policies. A policy with a prefill-time method has its prompt thinned out
    before this returns; one with ``prompt_queries`` has its utilities.

    Args:
      model: the decoder.
      params: its parameters.
      tokens: [B, T] int, rows padded on the right with any number.
        Ids from the vocabulary: one beyond it makes the row's logits NaN (``state.finite``).
      lengths: [B] int, tokens of each row, 1 .. T. Concrete: budgets are computed from them.
      policy: sets each row's budget and the capacity after decode step 1.
      max_new_tokens: tokens that will be decoded; needed where the cache grows with them, since it
        must have room.
      rows: [B] ints from 0 on, a number for each row, which random evictions are drawn for; None
        numbers them 0 .. B-1. Give a row's own to have it evict as in another batch.
      mesh: static, as of ``load``: devices over which the state is laid, its slots over axis
        "context" up to decode step 1. Axis "data" must divide B. None for one device.

    Returns:
      state: ready for decode step 1, S > T slots.
      logits: [B, V] float32, of each row's last token.

    Raises:
      ValueError: an argument of another kind, an empty batch or prompt, a length outside 1 .. T,
        an id outside 0 .. V - 1, a prompt beyond the model's positions, ``max_new_tokens`` missing
        or below 1, or a budget the policy refuses. All before anything is compiled.

    Source: arXiv 2609.03515 section 3.1; chunking is ours.
    """
    read = read_prompts(
        *(model, params, tokens, lengths, [policy]),
        max_new_tokens=max_new_tokens,
        rows=rows,
        mesh=mesh,
    )
    return start(model, params, read, policy, max_new_tokens=max_new_tokens), read.logits


@dataclasses.dataclass(frozen=True)
class ReadPrompts:
    """Prompts in a full cache, from which one or more policies can start.

    Attributes:
      state: nothing is ranked, and no budget set.
      logits: [B, V] float32, of each row's last token.
      tokens: [B, S] int32, the prompts, padded.
      lengths: [B] int32, tokens of each row.
      observed: what was noted of the prompts' queries, by layer.
      mesh: the layout over which the state lies (``sharding.layout``); None for one device.
    """

    state: KVState
    logits: Array
    tokens: np.ndarray
    lengths: np.ndarray
    observed: tuple[Observed, ...]
    mesh: Mesh | None = None


def read_prompts(
    model: Model,
    params: Params,
    tokens: Array | np.ndarray,
    lengths: Array | np.ndarray,
    policies: Sequence[Policy],
    *,
    max_new_tokens: int | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    least_slots: int = 0,
    mesh: Mesh | None = None,
) -> ReadPrompts:
    """Read prompts once for several policies; ``start`` goes on with each.

    The policies must have the same ``observing_of``: what a policy notes of the prompt is part of
    reading it. ``least_slots`` asks for a larger cache than they need. The other arguments, and
    what is raised, are ``prefill``'s.
    """
    for policy in policies:
        check_policy(policy)
    check_model(model)
    mesh = layout(mesh, model)
    (observing,) = {observing_of(policy) for policy in policies}
    tokens, lengths = checked_prompts(model, tokens, lengths, max_new_tokens)
    check_batch(mesh, len(lengths))
    for policy in policies:
        policy.budgets(lengths, model)
        if policy.prefill is not None:
            policy.prefill.check(lengths, model)
    needed = [full_slots(model, policy, lengths, max_new_tokens) for policy in policies]
    for policy in policies:  # after what compiles nothing
        policy.knobs(model)  # refuses weights of another model
    parts = 1 if mesh is None else mesh.shape[CONTEXT]
    slots, chunk = in_chunks(max(least_slots, *needed), parts)
    padded = np.zeros((len(lengths), slots), np.int32)
    longest = int(lengths.max())
    padded[:, :longest] = np.where(is_prompt(tokens, lengths), tokens, 0)[:, :longest]
    state, logits, observed = read_chunks(
        model, params, padded, lengths, chunk=chunk, observing=observing, mesh=mesh
    )
    if rows is not None:
        state = dataclasses.replace(state, row=checked_rows(rows, len(lengths)))
    return ReadPrompts(state, logits, padded, lengths, observed, mesh)


def full_slots(
    model: Model, policy: Policy, lengths: np.ndarray, max_new_tokens: int | None
) -> int:
    """Slots of the full cache that a policy needs: for the prompts and for what may follow."""
    most_kept = _most_kept(model, policy, lengths, max_new_tokens)
    longest = int(lengths.max())
    return whole_chunks(
        max(longest + 1, longest + _new_tokens(policy, max_new_tokens), most_kept + 1)
    )


def start(
    model: Model,
    params: Params,
    read: ReadPrompts,
    policy: Policy,
    *,
    max_new_tokens: int | None = None,
    donate: bool = True,
) -> KVState:
    """The state from which a policy decodes prompts that were read for it, ready for step 1.

    Args:
      model: the decoder.
      params: its parameters.
      read: from ``read_prompts`` with this policy among its policies.
      policy: ranks the tokens, sets the budgets, may thin the prompts out.
      max_new_tokens: as ``read_prompts`` had it.
      donate: False leaves ``read`` usable for the next policy; the state may then share buffers
        with it, so decode it with ``donate=False``, too.
    """
    budgets = policy.budgets(read.lengths, model)
    state = dataclasses.replace(read.state, budget=jnp.asarray(budgets))
    state = rank(state, read.observed, policy, model)
    most_kept = _most_kept(model, policy, read.lengths, max_new_tokens)
    kept_slots = kv_state.slots_for(most_kept + 1, multiple=64) if policy.evicts else None
    if policy.prefill is not None:
        # What stays of the prompt may be less than what decoding may keep: room for that, too.
        state = thin_out_prompt(
            model,
            params,
            state,
            read.tokens,
            read.observed,
            policy.prefill,
            read.lengths,
            new_tokens=_new_tokens(policy, max_new_tokens),
            least_slots=kept_slots or 0,
            donate=donate,
        )
    # Set outside, for it is part of the state's type: inside, every capacity would compile anew.
    state = dataclasses.replace(state, kept_slots=kept_slots)
    return place(state, read.mesh)


def _most_kept(model, policy, lengths, max_new_tokens) -> int:
    """Tokens that a ranking may hold after a decode step; 0 if nothing is evicted."""
    if not policy.evicts:
        return 0
    seen = lengths
    if policy.ratio_of == "seen":
        if max_new_tokens is None:
            raise ValueError(
                f"the budget of policy {policy.name!r} grows with the text, so prefill needs "
                "max_new_tokens= to size the cache"
            )
        seen = lengths + max_new_tokens
    # A row never holds more tokens than the model has positions, whatever its budget.
    return min(int(policy.budgets(seen, model).max()), model.max_positions)


def _new_tokens(policy: Policy, max_new_tokens: int | None) -> int:
    """Room for new tokens that the full cache needs; none if decoding evicts."""
    if policy.evicts:
        return 0
    if max_new_tokens is None:
        raise ValueError(
            f"policy {policy.name!r} evicts nothing while decoding, so prefill needs "
            "max_new_tokens= to size the cache"
        )
    return max_new_tokens


def whole_chunks(tokens: int) -> int:
    """Slots of a full cache of so many tokens."""
    return kv_state.slots_for(tokens, multiple=CHUNK if tokens > CHUNK else 64)


def in_chunks(slots: int, parts: int) -> tuple[int, int]:
    """Slots of which each of ``parts``, the size of axis "context", has whole chunks; their size.

    Args:
      slots: as of ``whole_chunks``.
      parts: devices that divide them.
    """
    if parts > 1:
        slots = parts * whole_chunks(-(-slots // parts))
    return slots, CHUNK if slots // parts % CHUNK == 0 else 64


# A module-level jit: one cache of programs for the life of the process.
@functools.partial(jax.jit, static_argnames=("model", "chunk", "observing", "mesh"))
def read_chunks(model, params, tokens, lengths, *, chunk, observing, mesh=None):
    """The program of ``read_prompts``: a state without budget, last logits, what was observed."""
    batch, slots = tokens.shape
    windows = model.sliding_windows

    def read_chunk(index, carry):
        keys, values, observed, last_hidden = carry
        offset = index * chunk
        within = jnp.arange(chunk, dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(offset + within, (batch, chunk))
        chunk_tokens = jax.lax.dynamic_slice_in_dim(tokens, offset, chunk, axis=1)
        rotary = model.rotary(positions) if observing is not None and observing.moments else None
        if mesh is not None:
            spread = NamedSharding(mesh, TOKENS)
            chunk_tokens = jax.lax.with_sharding_constraint(chunk_tokens, spread)
        cache = PrefillCache(
            *(keys, values, offset, lengths, observed, rotary),
            windows=windows,
            observing=observing,
            mesh=mesh,
        )
        hidden, cache = model.hidden(params, chunk_tokens, positions, cache)
        place = lengths - 1 - offset
        row_hidden = jnp.take_along_axis(
            hidden, jnp.clip(place, 0, chunk - 1)[:, None, None], axis=1
        )[:, 0]
        here = (place >= 0) & (place < chunk)
        last_hidden = jnp.where(here[:, None], row_hidden, last_hidden)
        return cache.keys, cache.values, cache.observed, last_hidden

    keys = _empty_caches(model, batch, slots, chunk)
    values = _empty_caches(model, batch, slots, chunk)
    observed = nothing_observed(
        observing,
        kv_state.num_eligible(model),
        batch,
        model.num_heads,
        (batch, model.num_kv_heads, slots, model.head_dim),
    )
    start = (keys, values, observed)
    hidden_shape = jax.eval_shape(
        lambda p: model.hidden(
            p,
            tokens[:, :chunk],
            jnp.zeros((batch, chunk), jnp.int32),
            PrefillCache(keys, values, jnp.int32(0), lengths, windows=windows),
        )[0],
        params,
    )
    last_hidden = jnp.zeros((batch, hidden_shape.shape[-1]), hidden_shape.dtype)
    num_chunks = (jnp.max(lengths) + chunk - 1) // chunk
    keys, values, observed, last_hidden = jax.lax.fori_loop(
        0, num_chunks, read_chunk, (*start, last_hidden)
    )
    logits = model.logits(params, last_hidden)
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    valid = slot < lengths[:, None]
    state = KVState(
        keys=_rings(keys, lengths, windows),
        values=_rings(values, lengths, windows),
        scores=jnp.zeros((batch, slots), jnp.float32),
        valid=valid,
        positions=jnp.where(valid, slot, kv_state.FREE_POSITION),
        budget=jnp.full((batch,), kv_state.NO_EVICTION, jnp.int32),
        next_position=lengths,
        row=jnp.arange(batch, dtype=jnp.int32),
        finished=jnp.zeros((batch,), jnp.bool_),
        finite=jnp.isfinite(logits).all(axis=-1),
        step=jnp.zeros((), jnp.int32),
    )
    return state, logits, observed


def _empty_caches(model: Model, batch: int, slots: int, chunk: int) -> tuple[Array, ...]:
    """Zeros to read the prompt into: all slots, or a ring of the window and a chunk."""

    def size(window):
        return slots if window is None else min(slots, -(-window // chunk) * chunk + chunk)

    return tuple(
        jnp.zeros((batch, model.num_kv_heads, size(window), model.head_dim), model.dtype)
        for window in model.sliding_windows
    )


def _rings(leaves, lengths: Array, windows) -> tuple[Array, ...]:
    """Bring each sliding window from its place in prefill's ring to slot p % W."""

    def ring(leaf, window):
        if window is None:
            return leaf
        positions = ring_positions(lengths - 1, window)
        source = (positions % leaf.shape[2])[:, None, :, None]
        source = jnp.broadcast_to(source, (*leaf.shape[:2], window, 1))
        return jnp.take_along_axis(leaf, source, axis=2, mode="promise_in_bounds")

    return tuple(map(ring, leaves, windows))
