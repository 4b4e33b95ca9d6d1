"""Write one token's keys or values into the cache, in place."""

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels import dispatch
from inertiakv_jax.pallas_kernels.write_token import ref, tpu

IMPLEMENTATIONS = ("xla", "tpu")
_tpu = jax.jit(tpu.write_token)  # so that layers share one trace, also on platforms that drop it


def write_token(
    cache: Array, token: Array, slot: Array, *, implementation: str | None = None
) -> Array:
    """Put one token a row into its slot: ``result[b, k, slot[b]] = token[b, k]``.

    In a loop that carries the cache, or a program that is given it, nothing else moves.

    Args:
      cache: [B, K, S, D].
      token: [B, K, D], dtype of ``cache``.
      slot: [B] or [B, K] int32, from 0 to S, which is not checked; S writes nowhere.
      implementation: one of ``IMPLEMENTATIONS``; None takes the kernel on TPUs, where plain JAX
        would copy the cache, and plain JAX elsewhere.

    Returns:
      [B, K, S, D], dtype of ``cache``.

    Raises:
      ValueError: shapes or dtypes disagree, or the implementation is unknown or refuses the shape
        or dtype (while tracing); or it cannot run on the device that is compiled for (while
        lowering).

    Source: ours.

    Example:
      >>> cache = jnp.zeros((2, 1, 3, 1))
      >>> written = write_token(cache, jnp.ones((2, 1, 1)), jnp.asarray([1, 3]))
      >>> written[:, 0, :, 0].tolist()
      [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    _check(cache, token, slot)
    dispatch.check_implementation(implementation, IMPLEMENTATIONS)
    refusal = tpu.refusal(cache)
    if implementation == "tpu":
        if refusal is not None:
            raise ValueError(refusal)
        return dispatch.run_only_on("tpu", _tpu, cache, token, slot)
    if implementation == "xla" or refusal is not None:
        return ref.write_token(cache, token, slot)
    return jax.lax.platform_dependent(cache, token, slot, tpu=_tpu, default=ref.write_token)


def _check(cache: Array, token: Array, slot: Array) -> None:
    if cache.ndim != 4:
        raise ValueError(f"cache must be [B, K, S, D], got shape {cache.shape}")
    batch, num_kv_heads, _, head_dim = cache.shape
    shape = (batch, num_kv_heads, head_dim)
    if token.shape != shape or token.dtype != cache.dtype:
        raise ValueError(f"token must be {cache.dtype} {shape}, got {token.dtype} {token.shape}")
    if slot.shape not in ((batch,), (batch, num_kv_heads)) or slot.dtype != jnp.int32:
        raise ValueError(
            f"slot must be int32 ({batch},) or ({batch}, {num_kv_heads}), "
            f"got {slot.dtype} {slot.shape}"
        )
