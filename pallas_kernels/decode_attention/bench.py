"""Decode attention as a case for ``pallas_kernels.bench``."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels.bench import noise
from inertiakv_jax.pallas_kernels.decode_attention.api import IMPLEMENTATIONS, decode_attention
from inertiakv_jax.pallas_kernels.decode_attention.shapes import Heads


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode step's attention in one layer, with the mass (scored) or without it."""

    heads: Heads
    batch: int
    """B."""
    slots: int
    """S."""
    dtype: str
    """Of query, keys and values."""

    kernel = "decode_attention"
    implementations = IMPLEMENTATIONS
    scorings = (True, False)
    has_kernel = True

    @property
    def name(self) -> str:
        """Of the heads."""
        return self.heads.name

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.heads.kv_bytes(self.batch, self.slots, self._itemsize)

    def bytes_moved(self, scored: bool) -> int:
        """Keys, values, query, output, the bool mask [B, S] and, if scored, the float32 mass."""
        small = 2 * self.batch * self.heads.num_heads * self.heads.head_dim * self._itemsize
        mass = self.heads.mass_bytes(self.batch, self.slots) if scored else 0
        return self.read_bytes + small + self.batch * self.slots + mass

    @property
    def working_bytes(self) -> int:
        """Of one call beside its operands: the cache in float32, which XLA may make."""
        return self.heads.kv_bytes(self.batch, self.slots, 4)

    def facts(self) -> dict[str, Any]:
        """What is particular to this kernel, ready for JSON."""
        heads = self.heads
        return {
            "heads": heads.num_heads,
            "kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
        }

    def link(self) -> Array:
        """What one call hands to the next: the query."""
        shape = (self.batch, self.heads.num_heads, self.heads.head_dim)
        return noise(shape, jnp.dtype(self.dtype), 0)

    def inputs(self, number: int) -> tuple[Any, Any]:
        """Nothing that is updated; keys, values and the mask."""
        shape = (self.batch, self.heads.num_kv_heads, self.slots, self.heads.head_dim)
        keys, values = (noise(shape, jnp.dtype(self.dtype), 2 * number + i) for i in (1, 2))
        return (), (keys, values, jnp.ones((self.batch, self.slots), jnp.bool_))

    def call(self, implementation: str | None, scored: bool) -> Callable:
        """One attention; its output is the next one's query."""

        def run(query, state, fixed):
            output, mass = decode_attention(
                query, *fixed, return_mass=scored, implementation=implementation
            )
            return output, state, mass

        return run

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize
