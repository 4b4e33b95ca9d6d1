"""The write of one token on a TPU, where slots are the last axis: one tile of lanes a row.

Of a cache whose D does not fill 128 lanes XLA keeps S last (see ``decode_attention.tpu``), but for
a scatter it would keep D last, padded, and copy the cache whole for attention, at every step. This
kernel reads the 128 slots around the new one and writes them back.

Compiled ahead of time for v5e, v5p and v6e, numbers checked in interpret mode; never run on a TPU.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128


def refusal(cache: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why a cache [B, K, S, D] cannot be taken; None where it can.

    >>> refusal(jax.ShapeDtypeStruct((1, 8, 64, 128), "bfloat16"))
    'the TPU kernel takes no head_dim that is a multiple of 128, as plain JAX is as good, got 128'
    """
    head_dim = cache.shape[-1]
    if head_dim % _LANES == 0:
        return (
            f"the TPU kernel takes no head_dim that is a multiple of {_LANES}, as plain JAX is "
            f"as good, got {head_dim}"
        )
    if cache.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel takes float32 or bfloat16, got {cache.dtype}"
    return None


def write_token(
    cache: Array,
    token: Array,
    slot: Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Write one token; see ``api.write_token`` for the meaning and the shapes."""
    refused = refusal(cache)
    if refused is not None:
        raise ValueError(refused)
    batch, num_kv_heads, slots, head_dim = cache.shape
    slot = slot if slot.ndim == 2 else slot[:, None]
    heads = num_kv_heads // slot.shape[1]  # that share a slot

    def tile(b, h, slot):
        # Not //: for the sign that it asks for, Pallas wants to know the TPU's generation.
        return b, h, 0, jax.lax.div(jnp.minimum(slot[b, h], slots - 1), jnp.int32(_LANES))

    def kernel(slot, token, old, new):
        # token [1, heads, 1, D]; old and new [1, heads, D, 128]
        b, h = pl.program_id(0), pl.program_id(1)
        lane = jax.lax.broadcasted_iota(jnp.int32, (head_dim, _LANES), 1)
        # S lies in no tile, or beyond the end of the last.
        here = lane == slot[b, h] - tile(b, h, slot)[3] * _LANES
        for i in range(heads):
            # By way of float32, which turns rows into columns and masks in every generation.
            column = token[0, i].astype(jnp.float32).reshape(head_dim, 1)
            new[0, i] = jnp.where(here, column, old[0, i].astype(jnp.float32)).astype(new.dtype)

    block = pl.BlockSpec((1, heads, head_dim, _LANES), tile)
    written = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, num_kv_heads // heads),
            in_specs=[pl.BlockSpec((1, heads, 1, head_dim), lambda b, h, _: (b, h, 0, 0)), block],
            out_specs=block,
        ),
        out_shape=jax.ShapeDtypeStruct((batch, num_kv_heads, head_dim, slots), cache.dtype),
        input_output_aliases={2: 0},
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=2 * token.size * _LANES * cache.dtype.itemsize,
        ),
        interpret=interpret,
        name="write_token",
    )(slot, token[:, :, None], cache.swapaxes(2, 3))
    return written.swapaxes(2, 3)
