"""Plain JAX gather of cache slots: the reference of ``api.compact``."""

import jax.numpy as jnp
from jax import Array


def compact(cache: Array, source: Array) -> Array:
    """Gather slots; see ``api.compact`` for the meaning and the shapes."""
    index = source if source.ndim == 3 else source[:, None]
    return jnp.take_along_axis(cache, index[..., None], axis=2)
