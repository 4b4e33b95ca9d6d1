"""The eviction step as a case for ``pallas_kernels.bench``."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels.bench import noise
from inertiakv_jax.pallas_kernels.evict import api

SHARED = "shared"
"""Name of the case of one ranking a row, whatever the model."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step's eviction from [B, S], or from [B, K, S] of a layer whose kv heads rank apart."""

    name: str
    """``SHARED``, or of the heads."""
    num_kv_heads: int | None
    """K; None for one ranking a row."""
    batch: int
    """B."""
    slots: int
    """S."""

    kernel = "evict"
    dtype = "float32"
    implementations = api.IMPLEMENTATIONS
    scorings = (True, False)
    has_kernel = True

    @property
    def read_bytes(self) -> int:
        """Bytes of utilities and positions, which are updated in place."""
        return 8 * math.prod(self._rankings) * self.slots

    def bytes_moved(self, scored: bool) -> int:
        """Utilities and positions read and written, the increment read, and 13 bytes a ranking."""
        return math.prod(self._rankings) * ((20 if scored else 16) * self.slots + 13)

    @property
    def working_bytes(self) -> int:
        """Of one call beside its operands."""
        return 4 * self.read_bytes

    def facts(self) -> dict[str, Any]:
        """What is particular to this kernel, ready for JSON."""
        return {"kv_heads": self.num_kv_heads}

    def link(self) -> Array:
        """What one call hands to the next: zeros for ``next_position``."""
        return jnp.zeros(self._rankings, jnp.int32)

    def inputs(self, number: int) -> tuple[Any, Any]:
        """Utilities and positions; increment, next position, budget and active rows."""
        shape = (*self._rankings, self.slots)
        scores, increment = (noise(shape, jnp.dtype("float32"), 2 * number + i) for i in (1, 2))
        positions = jnp.broadcast_to(jnp.arange(self.slots, dtype=jnp.int32), shape)
        next_position = jnp.full(self._rankings, self.slots, jnp.int32)
        active = jnp.ones(self._rankings, jnp.bool_)
        # The first call evicts; later ones find the budget kept, and do the same work.
        return (scores, positions), (increment, next_position, next_position - 1, active)

    def call(self, implementation: str | None, scored: bool) -> Callable:
        """A step that scores, or one that does not."""

        def run(link, state, fixed):
            scores, positions = state
            increment, next_position, budget, active = fixed
            scores, positions, slot = api.evict(
                scores,
                increment if scored else None,
                positions,
                next_position + link,
                budget,
                active,
                decay=0.5,
                implementation=implementation,
            )
            return jnp.minimum(slot, 0), (scores, positions), ()  # 0, which XLA cannot know

        return run

    @property
    def _rankings(self) -> tuple[int, ...]:
        heads = () if self.num_kv_heads is None else (self.num_kv_heads,)
        return (self.batch, *heads)
