"""Plain JAX decode attention: the reference of every kernel, and the path that runs on a CPU."""

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.numerics import masked_softmax


def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    valid: Array,
    *,
    scale: float,
    soft_cap: float | None,
    return_mass: bool,
) -> tuple[Array, Array | None]:
    """Attend and score; see ``api.decode_attention`` for the mathematics and the shapes."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = jnp.einsum("bkgd,bksd->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    logits = logits * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    mask = valid[:, None, None] if valid.ndim == 2 else valid[:, :, None]
    probabilities = masked_softmax(logits, mask)
    output = _weighted_sum(probabilities, values, mask)
    output = output.reshape(query.shape).astype(query.dtype)
    return output, probabilities.sum(axis=2) if return_mass else None


def _weighted_sum(probabilities: Array, values: Array, mask: Array) -> Array:
    """Sum of ``values`` weighted by [B, K, G, S] probabilities, blind to values in dead slots."""

    def plain(probabilities, values, mask):
        del mask
        return jnp.einsum(
            "bkgs,bksd->bkgd",
            probabilities.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )

    def masked(probabilities, values, mask):
        # 0 * NaN is NaN: a weight of 0 does not hide what a dead slot holds.
        return plain(probabilities, jnp.where(mask[:, :, 0, :, None], values, 0), mask)

    def masked_if_needed(probabilities, values, mask):
        # On a CPU the select is a copy of all values (4,096 slots: 3.4x the whole attention), and
        # needed only where a dead slot holds NaN or infinity, which then shows in the sum.
        output = plain(probabilities, values, mask)
        return jax.lax.cond(
            jnp.isfinite(output).all(),
            lambda output, *_: output,
            lambda _, *operands: masked(*operands),
            output,
            probabilities,
            values,
            mask,
        )

    return jax.lax.platform_dependent(
        probabilities, values, mask, cpu=masked_if_needed, default=masked
    )
