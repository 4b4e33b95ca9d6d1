"""Age the utilities of a step and drop the lowest token of each row, in one pass."""

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels import dispatch
from inertiakv_jax.pallas_kernels.evict import ref, tpu

IMPLEMENTATIONS = ("xla", "tpu")


def evict(
    scores: Array,
    increment: Array | None,
    positions: Array,
    next_position: Array,
    budget: Array,
    active: Array,
    *,
    decay: Array | float,
    protect_first: Array | int = 0,
    protect_recent: Array | int = 0,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """Age utilities, then free the slot of the lowest token of each row that is over its budget.

    In each active row, over its slots s, of which those with ``positions >= 0`` hold a token:

        m[s]   = decay * scores[s] + increment[s]
        may go = the row holds more than ``budget`` tokens, and
                 protect_first <= positions[s] < next_position - protect_recent
        freed  = of those that may go the one with the lowest m; of equals, the lowest position

    A row is one ranking: leading axes are [B] where layers and heads share it, [L, B] or
    [L, B, K] for one each. A row that is not active comes back bit for bit.

    Args:
      scores: [..., S] float32, utilities; 0 in free slots.
      increment: [..., S] float32, what the step's scores add; None for a step that does not score.
      positions: [..., S] int32, distinct within a row; -1 in free slots.
      next_position: [...] int32, tokens seen, the newest included.
      budget: [...] int32, tokens to leave.
      active: [...] bool, rows that take the step.
      decay: scalar in [0, 1].
      protect_first: scalar int32 >= 0; positions below it stay.
      protect_recent: scalar int32 >= 0; so many of the latest positions stay.
      implementation: one of ``IMPLEMENTATIONS``; None takes the kernel on TPUs, for rows that fit,
        and plain JAX elsewhere.

    Returns:
      scores: [..., S] float32, aged; 0 in the slot that was freed.
      positions: [..., S] int32; -1 in the slot that was freed. The new mask is ``positions >= 0``.
      slot: [...] int32, the slot that was freed; S where none was.

    Raises:
      ValueError: shapes or dtypes disagree, or the implementation is unknown or refuses the shape
        (while tracing); or it cannot run on the device that is compiled for (while lowering).

    Source: arXiv 2609.03515 section 3.2, eq. 4; the tie rule and the fusion are ours.

    Example:
      >>> import jax.numpy as jnp
      >>> scores, positions, slot = evict(
      ...     jnp.array([[0.5, 0.25, 0.25]]),
      ...     None,
      ...     jnp.array([[0, 2, 1]]),
      ...     next_position=jnp.array([3]),
      ...     budget=jnp.array([2]),
      ...     active=jnp.array([True]),
      ...     decay=0.5,
      ... )
      >>> positions.tolist(), slot.tolist()
      ([[0, 2, -1]], [2])
    """
    _check(scores, increment, positions, next_position, budget, active)
    dispatch.check_implementation(implementation, IMPLEMENTATIONS)
    knobs = (
        jnp.asarray(decay, jnp.float32),
        jnp.asarray(protect_first, jnp.int32),
        jnp.asarray(protect_recent, jnp.int32),
    )
    operands = (scores, increment, positions, next_position, budget, active, *knobs)
    refusal = tpu.refusal(scores.shape)
    if implementation == "tpu":
        if refusal is not None:
            raise ValueError(refusal)
        return dispatch.run_only_on("tpu", tpu.evict, *operands)
    if implementation == "xla" or refusal is not None:
        return ref.evict(*operands)
    return jax.lax.platform_dependent(*operands, tpu=tpu.evict, default=ref.evict)


def _check(scores, increment, positions, next_position, budget, active) -> None:
    if scores.ndim < 2:
        raise ValueError(f"scores must be [..., S] with leading axes, got shape {scores.shape}")
    for name, array, shape, dtype in (
        ("scores", scores, scores.shape, jnp.float32),
        ("increment", increment, scores.shape, jnp.float32),
        ("positions", positions, scores.shape, jnp.int32),
        ("next_position", next_position, scores.shape[:-1], jnp.int32),
        ("budget", budget, scores.shape[:-1], jnp.int32),
        ("active", active, scores.shape[:-1], jnp.bool_),
    ):
        if array is not None and (array.shape != shape or array.dtype != dtype):
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name} {shape}, got {array.dtype} {array.shape}"
            )
