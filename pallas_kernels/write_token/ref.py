"""Plain JAX write of one token: the reference of the kernel, and the path that runs elsewhere."""

import jax
import jax.numpy as jnp
from jax import Array


def write_token(cache: Array, token: Array, slot: Array) -> Array:
    """Write one token; see ``api.write_token`` for the meaning and the shapes.

    One scatter row per kv head, at least two, and a barrier behind: XLA:CPU (jax 0.10) turns the
    update of a single row into one it fuses with each reader, copying the cache three times a step.
    """
    batch, num_kv_heads, slots, head_dim = cache.shape
    rows, heads = jnp.arange(batch)[:, None], jnp.arange(num_kv_heads)[None]
    places = slot if slot.ndim == 2 else slot[:, None]
    if batch == num_kv_heads == 1:
        heads = jnp.zeros((1, 2), jnp.int32)
        places = jnp.concatenate([places, jnp.full_like(places, slots + 1)], axis=1)  # dropped
        token = jnp.broadcast_to(token, (1, 2, head_dim))
    written = cache.at[rows, heads, places].set(token, mode="drop", unique_indices=True)
    return jax.lax.optimization_barrier(written)
