"""Dropping many tokens at once, and moving what is left into a smaller cache."""

import dataclasses
import itertools

import jax.numpy as jnp
from jax import Array

from inertiakv_jax import eviction
from inertiakv_jax.pallas_kernels.compact.api import compact
from inertiakv_jax.state import FREE_POSITION, KVState


def drop(state: KVState, kept: Array) -> KVState:
    """Free the slots outside ``kept`` [..., S]; keys and values stay where they are, dead."""
    return dataclasses.replace(
        state,
        scores=jnp.where(kept, state.scores, 0.0),
        valid=kept,
        positions=jnp.where(kept, state.positions, FREE_POSITION),
    )


def shrink(state: KVState, slots: int, windows: tuple[int | None, ...]) -> KVState:
    """Gather the held tokens into ``slots`` slots, in the order of the text.

    Args:
      state: no ranking holds more than ``slots`` tokens.
      slots: static; the present number changes nothing.
      windows: of the model; a layer with a sliding window stays as it is.
    """
    if slots == state.num_slots:
        return state
    source, valid = eviction.compaction(state.valid, state.positions, slots)

    def gather_eligible(leaves):
        # One source for all layers, or one each; a sliding window stays as it is.
        sources = itertools.repeat(source) if source.ndim == 2 else iter(source)
        return tuple(
            leaf if window is not None else compact(leaf, next(sources))
            for leaf, window in zip(leaves, windows, strict=True)
        )

    def gather_row(leaf, empty):
        return jnp.where(valid, jnp.take_along_axis(leaf, source, axis=-1), empty)

    return dataclasses.replace(
        state,
        keys=gather_eligible(state.keys),
        values=gather_eligible(state.values),
        scores=gather_row(state.scores, 0.0),
        valid=valid,
        positions=gather_row(state.positions, FREE_POSITION),
    )
