"""A mixture of experts in place of the MLP: each token goes to the few its router likes best."""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.models.layers import ACTIVATIONS, int8_kernel, linear

TILE_ROWS = 16  # rows that an expert is multiplied with at a time where many are routed to it


class Kernels(NamedTuple):
    """One linear map per expert; int8 numbers have a scale."""

    values: Array  # [X, in, out]
    scales: Array | None  # [X, out] float32


class ExpertsMLP(nn.Module):
    """The MLPs of the chosen experts, added up with the router's weights.

    No token is dropped, whatever an expert's load: rows are sorted by expert, and each expert is
    multiplied with its own run of rows.
    """

    config: ModelConfig
    experts: ExpertsConfig
    dtype: jnp.dtype
    int8: bool = False

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Map [..., H] to [..., H]."""
        config, experts = self.config, self.experts
        tokens = hidden.reshape(-1, config.hidden_size)
        logits = linear(experts.num_experts, self.dtype, bias=False, name="router")(tokens)
        weights, chosen = route(logits, experts)
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # [tokens * chosen], by expert
        sizes = jnp.bincount(chosen.reshape(-1), length=experts.num_experts).astype(jnp.int32)
        width = config.hidden_size, experts.intermediate_size
        outputs = grouped_mlp(
            tokens[order // experts.num_per_token],
            sizes,
            self._kernels("gate_proj", *width),
            self._kernels("up_proj", *width),
            self._kernels("down_proj", *reversed(width)),
            config.activation,
        )
        outputs = outputs[jnp.argsort(order)].reshape(*chosen.shape, config.hidden_size)
        mixed = jnp.sum(outputs.astype(jnp.float32) * weights[..., None], axis=-2)
        return mixed.astype(self.dtype).reshape(hidden.shape)

    def _kernels(self, name: str, inputs: int, features: int) -> Kernels:
        shape = self.experts.num_experts, inputs, features
        return ExpertKernels(shape, self.dtype, self.int8, name=name)()


class ExpertKernels(nn.Module):
    """The stacked weights of one linear map per expert."""

    shape: tuple[int, int, int]
    dtype: jnp.dtype
    int8: bool

    @nn.compact
    def __call__(self) -> Kernels:
        """Declare them."""
        if self.int8:
            return Kernels(*int8_kernel(self, self.shape))
        initial = nn.initializers.lecun_normal(batch_axis=(0,))
        return Kernels(self.param("kernel", initial, self.shape, self.dtype), None)


def route(logits: Array, experts: ExpertsConfig) -> tuple[Array, Array]:
    """Choose each token's experts.

    Args:
      logits: [T, X], the router's.
      experts: how many of the X are chosen, and whether their weights are scaled to sum to 1.

    Returns:
      Weights [T, chosen] float32, largest first, and the experts' indices [T, chosen] int32.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, experts.num_per_token)
    if experts.normalize_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def grouped_mlp(
    rows: Array, sizes: Array, gate: Kernels, up: Kernels, down: Kernels, activation: str
) -> Array:
    """down(activation(gate(x)) * up(x)) of consecutive groups of rows, each with its own weights.

    ``jax.lax.ragged_dot`` is an instruction on TPUs. On CPUs jax (0.10) multiplies all rows with
    all matrices and masks, 128 times the work of Qwen3-30B-A3B; there a loop takes its place.

    Args:
      rows: [R, in].
      sizes: [X] int32, rows of each group; sums to R.
      gate: in to width.
      up: in to width.
      down: width to out.
      activation: "silu" or "gelu_tanh".

    Returns:
      [R, out].
    """
    branches = {"cpu": _grouped_mlp_by_tiles, "default": _grouped_mlp_by_ragged_dot}
    return jax.lax.platform_dependent(
        *(rows, sizes, gate, up, down),
        **{name: partial(branch, activation=activation) for name, branch in branches.items()},
    )


def _grouped_mlp_by_ragged_dot(
    rows: Array, sizes: Array, gate: Kernels, up: Kernels, down: Kernels, *, activation: str
) -> Array:
    group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))

    def project(rows: Array, kernels: Kernels) -> Array:
        values, scales = kernels
        if scales is None:
            return jax.lax.ragged_dot(rows, values, sizes)
        product = jax.lax.ragged_dot(
            rows, values.astype(rows.dtype), sizes, preferred_element_type=jnp.float32
        )
        return (product * scales[group]).astype(rows.dtype)

    return project(ACTIVATIONS[activation](project(rows, gate)) * project(rows, up), down)


def _grouped_mlp_by_tiles(
    rows: Array, sizes: Array, gate: Kernels, up: Kernels, down: Kernels, *, activation: str
) -> Array:
    """A tile of rows at a time, the group of its first row deciding the weights.

    A tile may reach into the next groups; tiles are written in order, so those overwrite it.
    """
    num_rows, num_groups = len(rows), len(sizes)
    tile = TILE_ROWS if num_rows > num_groups else 1
    tiles = -(-sizes // tile)
    ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(tiles)
    padded = jnp.pad(rows, ((0, tile), (0, 0)))

    def map_tile(index: Array, result: Array) -> Array:
        group = jnp.searchsorted(tile_ends, index, side="right", method="compare_all")
        first_tile = (tile_ends - tiles)[group]
        start = (ends - sizes)[group] + (index - first_tile) * tile
        part = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        project = partial(_project, group=group)
        mapped = project(ACTIVATIONS[activation](project(part, gate)) * project(part, up), down)
        return jax.lax.dynamic_update_slice_in_dim(result, mapped, start, axis=0)

    result = jnp.zeros((num_rows + tile, down.values.shape[-1]), rows.dtype)
    return jax.lax.fori_loop(0, tile_ends[-1], map_tile, result)[:num_rows]


def _project(rows: Array, kernels: Kernels, *, group: Array) -> Array:
    """Multiply all rows with the weights of one group."""
    values, scales = kernels
    if scales is None:
        return rows @ values[group]
    product = jnp.matmul(rows, values[group].astype(rows.dtype), preferred_element_type=jnp.float32)
    return (product * scales[group][None]).astype(rows.dtype)
