"""Programs with TPU kernels, for ``compile_ahead``."""

import jax
import jax.numpy as jnp

from inertiakv_jax.pallas_kernels.decode_attention import tpu
from inertiakv_jax.pallas_kernels.evict import api
from inertiakv_jax.pallas_kernels.write_token.api import write_token

Struct = jax.ShapeDtypeStruct


def _attend(query, keys, values, valid, soft_cap, return_mass):
    return tpu.decode_attention(
        query,
        keys,
        values,
        valid,
        scale=keys.shape[-1] ** -0.5,
        soft_cap=soft_cap,
        return_mass=return_mass,
    )


def _arrays(heads, batch, slots, dtype, valid_per_head):
    num_heads, num_kv_heads, head_dim = heads
    kv = Struct((batch, num_kv_heads, slots, head_dim), dtype)
    valid = (batch, num_kv_heads, slots) if valid_per_head else (batch, slots)
    return Struct((batch, num_heads, head_dim), dtype), kv, kv, Struct(valid, jnp.bool_)


def decode_attention(
    mesh,
    *,
    heads,
    batch,
    slots,
    dtype="bfloat16",
    valid_per_head=False,
    soft_cap=None,
    return_mass=True,
):
    """One call; ``heads`` is N, K, D."""
    del mesh

    def attend(query, keys, values, valid):
        return _attend(query, keys, values, valid, soft_cap, return_mass)

    return attend, _arrays(heads, batch, slots, dtype, valid_per_head)


def decode_loop(mesh, *, heads, batch, slots, dtype="bfloat16", slot_per_head=False):
    """Eight steps that each write a token into the donated cache and attend to it."""
    del mesh
    query, kv, _, valid = _arrays(heads, batch, slots, dtype, False)
    num_kv_heads = kv.shape[1]
    lead = (batch, num_kv_heads) if slot_per_head else (batch,)

    def loop(query, keys, values, valid, slot):
        def step(carry, _):
            query, keys, values, scores, slot = carry
            token = query[:, :num_kv_heads]
            keys, values = write_token(keys, token, slot), write_token(values, token, slot)
            query, mass = _attend(query, keys, values, valid, None, True)
            return (query, keys, values, scores + mass.sum(1), slot + 1), None

        scores = jnp.zeros((batch, slots), jnp.float32)
        carry, _ = jax.lax.scan(step, (query, keys, values, scores, slot), None, length=8)
        return carry

    return loop, (query, kv, kv, valid, Struct(lead, jnp.int32)), (1, 2)


def evict(mesh, *, shape, implementation, scored=True):
    """One step's eviction of utilities [..., S] in place."""
    del mesh

    def step(scores, positions, increment, next_position, budget, active, decay):
        return api.evict(
            scores,
            increment if scored else None,
            positions,
            next_position,
            budget,
            active,
            decay=decay,
            protect_first=4,
            protect_recent=8,
            implementation=implementation,
        )

    scores, positions = Struct(shape, jnp.float32), Struct(shape, jnp.int32)
    row = Struct(shape[:-1], jnp.int32)
    active = Struct(shape[:-1], jnp.bool_)
    return step, (scores, positions, scores, row, row, active, Struct((), jnp.float32)), (0, 1)
