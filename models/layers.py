"""The parts that decoder layers are made of: linear maps, norms and rotary embeddings."""

from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from inertiakv_jax.config import ModelConfig

Rotation = tuple[Array, Array]
"""Cosine and sine of every rotation angle, [B, C, 1, D / 2] float32 each."""

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": nn.silu,
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


def linear(
    features: int, dtype: DTypeLike, *, bias: bool, int8: bool = False, name: str | None = None
) -> nn.Module:
    """A linear map to ``features`` numbers; ``int8``: with weights of that kind."""
    if int8:
        return Int8Linear(features, jnp.dtype(dtype), bias, name=name)
    return nn.Dense(features, use_bias=bias, dtype=dtype, param_dtype=dtype, name=name)


class Int8Linear(nn.Module):
    """A linear map whose weights are int8 numbers times one float32 scale per output.

    The product is summed up in float32 and scaled at the end, so no float copy of the weights need
    be made where the hardware multiplies mixed types. (ours: per-channel weight-only quantisation
    as in qwix, whose interception of jax functions is more machinery than these lines.)
    """

    features: int
    dtype: jnp.dtype
    use_bias: bool

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Map [..., in] to [..., out] in the module's dtype."""
        shape = hidden.shape[-1], self.features
        kernel, scale = int8_kernel(self, shape)
        product = jnp.matmul(
            hidden, kernel.astype(self.dtype), preferred_element_type=jnp.float32
        ) * scale.reshape((1,) * (hidden.ndim - 1) + scale.shape)
        product = product.astype(self.dtype)
        if not self.use_bias:
            return product
        bias = self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
        return product + bias.reshape((1,) * (hidden.ndim - 1) + bias.shape)


def int8_kernel(module: nn.Module, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Declare int8 weights [..., in, out] and their scales [..., out] float32.

    Initial values are spread as those of a float layer, by 1 / sqrt(in).
    """

    def random(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.randint(key, shape, -127, 128, jnp.int8)

    def constant(key: Array, shape: tuple[int, ...]) -> Array:
        del key
        return jnp.full(shape, (3.0 / inputs) ** 0.5 / 127.0, jnp.float32)

    inputs = shape[-2]
    kernel = module.param("kernel", random, shape)
    return kernel, module.param("scale", constant, (*shape[:-2], shape[-1]))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32.

    As in Hugging Face's models the result is cast back before it is scaled, except with
    ``unit_offset`` (Gemma), where the scale is 1 + w and the cast comes last.
    """

    epsilon: float
    dtype: jnp.dtype
    unit_offset: bool = False

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Map [..., H] to [..., H] in the module's dtype."""
        initial = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        scale = self.param("scale", initial, hidden.shape[-1:], self.dtype)
        scale = scale.reshape((1,) * (hidden.ndim - 1) + scale.shape)
        wide = hidden.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        if self.unit_offset:
            return (normed * (1.0 + scale.astype(jnp.float32))).astype(self.dtype)
        return normed.astype(self.dtype) * scale


def rotary_embedding(config: ModelConfig, positions: Array, *, local: bool = False) -> Rotation:
    """The rotation of each of [B, C] positions; ``local``: in layers with a sliding window."""
    if local:
        frequencies = jnp.asarray(config.local_rope_inverse_frequencies())
    else:
        frequencies = jnp.asarray(config.rope_inverse_frequencies())
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
    rotation = jnp.cos(angles), jnp.sin(angles)
    if config.rope_scaling is None or (local and config.local_rope_theta is not None):
        return rotation
    return scaled(rotation, config.rope_scaling.attention_factor)


def scaled(rotation: Rotation, factor: float) -> Rotation:
    """The rotation that also multiplies by ``factor``, in float32 until ``rotate`` casts."""
    if factor == 1.0:
        return rotation
    cosine, sine = rotation
    return cosine * factor, sine * factor


def rotate(x: Array, rotation: Rotation) -> Array:
    """Rotate [B, C, heads, D]: pair (i, i + D/2) by its angle, in float32, back to x's dtype."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def soft_cap(x: Array, cap: float | None) -> Array:
    """Cap * tanh(x / cap), close to x near 0 and never beyond the cap; None leaves x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def matmul_transposed(hidden: Array, embedding: Array) -> Array:
    """[..., H] times [V, H] transposed, float32; the embedding is read as it lies."""
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(hidden, embedding, contract, preferred_element_type=jnp.float32)
