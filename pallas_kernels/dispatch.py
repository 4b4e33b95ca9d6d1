"""Which implementation of a kernel runs: by the platform of the program, not of this process."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

_DEVICES = {"tpu": "a TPU", "gpu": "an NVIDIA GPU"}  # the other implementations run on all
_LOWERING_NAMES = {"tpu": "tpu", "gpu": "cuda"}  # "gpu" alone may be another vendor's

_Result = TypeVar("_Result")


def check_implementation(
    implementation: str | None, known: Sequence[str], *, platform: str | None = None
) -> str | None:
    """The argument, if it can run.

    Args:
      implementation: None is the best for the device, which always runs.
      known: the names that there are.
      platform: of the device that it will run on, as in ``jax.Device.platform``; None: not known.

    Raises:
      ValueError: it is unknown, or needs another device.
    """
    if implementation not in (None, *known):
        raise ValueError(
            f"implementation must be None or one of {', '.join(known)}, got {implementation!r}"
        )
    if implementation in _DEVICES and platform not in (
        *(None, implementation),
        _LOWERING_NAMES[implementation],
    ):
        raise ValueError(_refusal(implementation, platform))
    return implementation


def run_only_on(implementation: str, run: Callable[..., _Result], *operands: Any) -> _Result:
    """``run(*operands)``, for a program that is compiled for the device of ``implementation``.

    For any other device lowering raises ValueError. Tracing cannot: it does not know the device,
    which need not be of this machine. Without this, Pallas would speak of its interpret mode.
    """

    def refuse(*operands):
        zero = _refuse_p.bind(implementation=implementation)
        shapes = jax.eval_shape(run, *operands)
        return jax.tree.map(lambda x: jnp.broadcast_to(zero.astype(x.dtype), x.shape), shapes)

    kernel = {_LOWERING_NAMES[implementation]: run}
    return jax.lax.platform_dependent(*operands, default=refuse, **kernel)


def _refusal(implementation: str, platform: str) -> str:
    return (
        f"implementation {implementation!r} needs {_DEVICES[implementation]}, "
        f"this program is for a device of platform {platform!r}"
    )


def _refuse(context: mlir.LoweringRuleContext, *, implementation: str):
    platforms = context.platforms or context.module_context.platforms
    raise ValueError(_refusal(implementation, "/".join(platforms)))


# Says no when it is lowered. Without operands, so it needs no rules for vmap and the like.
_refuse_p = Primitive("refuse_implementation")
_refuse_p.def_abstract_eval(lambda *, implementation: jax.typeof(np.zeros((), np.float32)))
mlir.register_lowering(_refuse_p, _refuse)


@_refuse_p.def_impl
def _refuse_eagerly(*, implementation: str):
    return jax.jit(lambda: _refuse_p.bind(implementation=implementation))()  # lowers it, so raises
