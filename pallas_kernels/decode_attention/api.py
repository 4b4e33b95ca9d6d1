"""Decode attention that also tells where the attention went."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels import dispatch
from inertiakv_jax.pallas_kernels.decode_attention import ref

IMPLEMENTATIONS = ("xla", "tpu", "gpu")
"""Names for ``implementation``: what XLA makes of ``ref``, and the Pallas kernels."""


def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    valid: Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    return_mass: bool = True,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Attend one query token to the valid slots and return the probability mass of each slot.

    For query head n in the group of kv head k, over the valid slots s:

        p[n, s]    = softmax_s(cap(scale * <query[n], keys[k, s]>))
        output[n]  = sum_s p[n, s] * values[k, s]
        mass[k, s] = sum of p[n, s] over the G query heads of k

    Logits, softmax and mass are float32 whatever the input dtype. Query heads n = k*G .. k*G+G-1
    share kv head k.

    Args:
      query: [B, N, D] float, rotated, not scaled.
      keys: [B, K, S, D] float; dead slots may hold anything, NaN included.
      values: [B, K, S, D] float; likewise.
      valid: [B, S] or [B, K, S] bool, the slots that are held.
      scale: multiplier of the logits, static; None means D ** -0.5.
      soft_cap: above 0; cap(x) = soft_cap * tanh(x / soft_cap), as in Gemma 2. None: cap(x) = x.
      return_mass: False leaves the mass out, for steps that do not score.
      implementation: one of ``IMPLEMENTATIONS``; None takes the best for the device that is
        compiled for, and always works.

    Returns:
      output: [B, N, D], dtype of ``query``; 0 for a row without a valid slot.
      mass: [B, K, S] float32, >= 0; 0 on dead slots; sums over S to G, or to 0 for such a row.
        None without ``return_mass``.

    Raises:
      ValueError: shapes disagree, K does not divide N, ``valid`` is not bool, ``soft_cap`` is not
        above 0, or the implementation is unknown or refuses the shape or dtype (while tracing); or
        it cannot run on the device that is compiled for (while lowering).

    Source: arXiv 2609.03515 section 3.2 (eq. 1) for the score; doing both in one pass is ours.

    Example:
      >>> import jax.numpy as jnp
      >>> keys = values = jnp.ones((1, 1, 3, 4))
      >>> valid = jnp.array([[True, True, False]])
      >>> output, mass = decode_attention(jnp.ones((1, 2, 4)), keys, values, valid)
      >>> output.shape, mass.tolist()
      ((1, 2, 4), [[[1.0, 1.0, 0.0]]])
    """
    _check(query, keys, values, valid)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"soft_cap must be above 0, got {soft_cap}")
    check_implementation(implementation)
    options = {"scale": scale, "soft_cap": soft_cap, "return_mass": return_mass}
    operands = (query, keys, values, valid)
    runs = {
        "xla": functools.partial(ref.decode_attention, **options),
        "tpu": functools.partial(_tpu, **options),
        "gpu": functools.partial(_gpu, **options),
    }
    if implementation == "xla":
        return runs["xla"](*operands)
    if implementation is not None:
        reason = _why_not(implementation, keys)
        if reason is not None:
            raise ValueError(reason)
        return dispatch.run_only_on(implementation, runs[implementation], *operands)
    # By the platform of the program, not of this process: it may be compiled ahead of time.
    best = {name: runs["xla" if _why_not(name, keys) else name] for name in ("tpu", "gpu")}
    return jax.lax.platform_dependent(
        *operands, tpu=best["tpu"], cuda=best["gpu"], default=runs["xla"]
    )


def _why_not(implementation: str, keys: Array) -> str | None:
    """Why a kernel cannot take keys [B, K, S, D]; None if it can."""
    if implementation == "tpu" and keys.dtype == jnp.float16:
        return "the TPU kernel takes float32 and bfloat16, not float16: Mosaic does not"
    if implementation == "gpu" and keys.shape[-1] % 16:
        return f"the GPU kernels take a head_dim that is a multiple of 16, got {keys.shape[-1]}"
    return None


# jit, so that the layers of a model share one trace, also on platforms that then drop it; imports
# inside, for a version of JAX may lack what another platform's kernel is made of.
_jit = functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "return_mass"))


@_jit
def _tpu(query, keys, values, valid, **options):
    from inertiakv_jax.pallas_kernels.decode_attention import tpu

    return tpu.decode_attention(query, keys, values, valid, **options)


@_jit
def _gpu(query, keys, values, valid, **options):
    from inertiakv_jax.pallas_kernels.decode_attention import gpu

    return gpu.decode_attention(query, keys, values, valid, **options)


def check_implementation(implementation: str | None, *, platform: str | None = None) -> str | None:
    """The argument, if it is known and can run on a device of ``platform`` (None: any).

    ValueError otherwise; see ``dispatch.check_implementation``.
    """
    return dispatch.check_implementation(implementation, IMPLEMENTATIONS, platform=platform)


def _check(query: Array, keys: Array, values: Array, valid: Array) -> None:
    if query.ndim != 3:
        raise ValueError(f"query must be [B, N, D], got shape {query.shape}")
    batch, num_heads, head_dim = query.shape
    if keys.ndim != 4 or keys.shape[0] != batch or keys.shape[3] != head_dim:
        raise ValueError(f"keys must be [B={batch}, K, S, D={head_dim}], got shape {keys.shape}")
    if values.shape != keys.shape:
        raise ValueError(f"values must have the shape of keys {keys.shape}, got {values.shape}")
    num_kv_heads, slots = keys.shape[1:3]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be divisible by {num_kv_heads=}")
    expected = ((batch, slots), (batch, num_kv_heads, slots))
    if valid.shape not in expected or valid.dtype != jnp.bool_:
        raise ValueError(
            f"valid must be bool of shape {expected[0]} or {expected[1]}, "
            f"got {valid.dtype} {valid.shape}"
        )
