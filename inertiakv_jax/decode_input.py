"""What ``decode`` and ``step`` are given, checked before anything is compiled."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from inertiakv_jax.distributed import fetch
from inertiakv_jax.policy import Policy, check_policy
from inertiakv_jax.state import KVState, ranking_shape
from inertiakv_jax.typing import Model, check_model


def checked_ids(name: str, ids: Array | np.ndarray | Sequence[int]) -> Array | np.ndarray:
    """Token ids as an array; ValueError for what int32 would round, wrap or fail at.

    Those from the host stay there until all is checked: to move them is a program, too.
    """
    array = ids if isinstance(ids, Array) else np.asarray(ids)
    integers = np.issubdtype(array.dtype, np.integer)
    wraps = isinstance(array, np.ndarray) and integers and np.any(array != array.astype(np.int32))
    if (array.size and not integers) or wraps:
        raise ValueError(f"{name} must be integers below 2**31, got {ids!r:.80}")
    return array


def checked_token(
    model: Model, state: KVState, policy: Policy, name: str, token: Array | Sequence[int]
) -> Array | np.ndarray:
    """The token of the next step, [B] ints; or a ValueError if the arguments do not fit together.

    By types and shapes alone, so also while a caller's program is traced. ``name`` is what the
    caller calls the token.
    """
    check_model(model)
    check_policy(policy)
    ids = checked_ids(name, token)
    batch = state.next_position.shape[0]
    if ids.shape != (batch,):
        raise ValueError(f"{name} must have shape ({batch},), got {ids.shape}")
    lead = ranking_shape(model, batch, policy.retention)
    if state.valid.shape[:-1] != lead:
        raise ValueError(
            f"policy {policy.name!r} has {policy.retention} rankings {lead}, but the state was "
            f"prefilled for others, {state.valid.shape[:-1]}"
        )
    if state.kept_slots is not None and not policy.evicts:
        raise ValueError(
            f"policy {policy.name!r} evicts nothing, but the state was prefilled for one that does"
        )
    return ids


def check_steps(
    model: Model,
    state: KVState,
    first_token: Array | np.ndarray,
    policy: Policy,
    steps: int,
    limit: int | Array,
) -> None:
    """Raise ValueError unless so many steps can follow; see ``decode``."""
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise ValueError(f"steps must be an integer, got {steps!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if any(isinstance(x, Tracer) for x in (state.next_position, limit, first_token)):
        return
    if any(isinstance(leaf, Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise ValueError(
            "the state was consumed by an earlier decode: go on with the one that it returned, or "
            "give it donate=False"
        )
    finished, tokens, positions = map(fetch, (state.finished, first_token, state.next_position))
    if np.any(~finished & ((tokens < 0) | (tokens >= model.vocab_size))):
        raise ValueError(
            f"first_token must be an id of every unfinished row, 0 .. {model.vocab_size - 1}, got "
            f"{tokens}; after a decode with limit= that is tokens[:, limit - 1]"
        )
    limit = int(limit)
    fewest = 0 if state.kept_slots is None else 1
    if not fewest <= limit <= steps:
        raise ValueError(f"limit must be in {fewest} .. steps={steps}, got {limit}")
    seen = int(np.max(np.where(finished, 0, positions)))
    if seen + limit > model.max_positions:
        raise ValueError(
            f"{seen} tokens and {limit} steps exceed the {model.max_positions} positions of the "
            "model"
        )
    _check_room(model, state, policy, seen, limit)


def _check_room(model: Model, state: KVState, policy: Policy, seen: int, steps: int) -> None:
    """Raise ValueError unless the cache has slots for all that will be held after ``steps``."""
    slots = state.num_slots if state.kept_slots is None else state.kept_slots
    if policy.evicts and policy.ratio_of == "seen":
        needed = int(policy.budgets([seen + steps], model)[0]) + 1
        if needed > slots:
            raise ValueError(
                f"after {steps} steps the budget needs {needed} slots, but the cache has {slots}; "
                "give prefill a larger max_new_tokens"
            )
        return
    # A budget beyond the slots never makes room: the cache was sized for the tokens to come.
    growing = fetch(state.budget) >= slots
    if not growing.any():
        return
    # On the host: ``num_held`` would compile a program.
    held = int(np.max(np.where(growing, fetch(state.valid).sum(axis=-1), 0)))
    if held and held + steps > slots:
        raise ValueError(f"{held} tokens and {steps} steps exceed the {slots} slots of the cache")
