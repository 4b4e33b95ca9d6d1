"""The gather at step 1 as a case for ``pallas_kernels.bench``."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels.bench import noise
from inertiakv_jax.pallas_kernels.compact import api, ref
from inertiakv_jax.pallas_kernels.decode_attention.shapes import Heads

_BUCKET = 64  # slots; what caches of this library are multiples of


@dataclasses.dataclass(frozen=True)
class Case:
    """Keys and values of one layer, shrunk to a tenth."""

    heads: Heads
    batch: int
    """B."""
    slots: int
    """S, of the full cache."""
    dtype: str
    """Of keys and values."""

    kernel = "compact"
    implementations = ("xla",)
    scorings = (True,)
    has_kernel = False

    @property
    def name(self) -> str:
        """Of the heads."""
        return self.heads.name

    @property
    def kept(self) -> int:
        """S', a tenth of the slots, in buckets."""
        return min(-(-self.slots // (10 * _BUCKET)) * _BUCKET, self.slots)

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys and values that are gathered from."""
        return self._kv_bytes(self.slots)

    def bytes_moved(self, scored: bool) -> int:
        """What is kept, read and written, and the index; a device may have to read more."""
        del scored
        return 2 * self._kv_bytes(self.kept) + 4 * self.batch * self.kept

    @property
    def working_bytes(self) -> int:
        """Of one call beside its operands: the result, and a cache that XLA may transpose."""
        return self._kv_bytes(self.kept) + self._kv_bytes(self.slots) // 2

    def facts(self) -> dict[str, Any]:
        """What is particular to this kernel, ready for JSON."""
        return {
            "kv_heads": self.heads.num_kv_heads,
            "head_dim": self.heads.head_dim,
            "kept_slots": self.kept,
        }

    def link(self) -> Array:
        """What one call hands to the next: zeros for the index."""
        return jnp.zeros((), jnp.int32)

    def inputs(self, number: int) -> tuple[Any, Any]:
        """Nothing that is updated; keys, values and the slots to keep."""
        shape = (self.batch, self.heads.num_kv_heads, self.slots, self.heads.head_dim)
        dtype = jnp.dtype(self.dtype)
        keys, values = (noise(shape, dtype, 2 * number + i) for i in (1, 2))
        source = jnp.arange(self.kept, dtype=jnp.int32) * (self.slots // self.kept)
        return (), (keys, values, jnp.broadcast_to(source, (self.batch, self.kept)))

    def call(self, implementation: str | None, scored: bool) -> Callable:
        """The library's gather, or plain ``jnp.take_along_axis`` for "xla"."""
        del scored
        gather = ref.compact if implementation == "xla" else api.compact

        def run(link, state, fixed):
            keys, values, source = fixed
            keys, values = gather(keys, source + link), gather(values, source + link)
            # 0, as the numbers are at most 1, which XLA cannot know.
            link = (0.5 * keys[0, 0, 0, 0].astype(jnp.float32)).astype(jnp.int32)
            return link, state, (keys, values)

        return run

    def _kv_bytes(self, slots: int) -> int:
        return self.heads.kv_bytes(self.batch, slots, jnp.dtype(self.dtype).itemsize)
