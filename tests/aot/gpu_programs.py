"""Programs with GPU kernels, for ``compile_ahead``."""

import jax
import jax.numpy as jnp

from inertiakv_jax.pallas_kernels.decode_attention import gpu, gpu_triton

Struct = jax.ShapeDtypeStruct


def decode_attention(
    mesh,
    *,
    heads,
    batch,
    slots,
    dtype="bfloat16",
    kernel=None,
    valid_per_head=False,
    soft_cap=None,
    return_mass=True,
    triton_tiles=None,
):
    """One call; ``heads`` is N, K, D, ``triton_tiles`` arguments of ``gpu_triton.Tiles``."""
    del mesh
    num_heads, num_kv_heads, head_dim = heads

    def attend(query, keys, values, valid):
        return gpu.decode_attention(
            query,
            keys,
            values,
            valid,
            scale=head_dim**-0.5,
            soft_cap=soft_cap,
            return_mass=return_mass,
            kernel=kernel,
            tiles=None if triton_tiles is None else gpu_triton.Tiles(*triton_tiles),
        )

    kv = Struct((batch, num_kv_heads, slots, head_dim), dtype)
    valid = (batch, num_kv_heads, slots) if valid_per_head else (batch, slots)
    query = Struct((batch, num_heads, head_dim), dtype)
    return attend, (query, kv, kv, Struct(valid, jnp.bool_))
