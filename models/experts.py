"""A mixture of experts in place of the MLP: each token goes to the few its router likes best."""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.models.layers import ACTIVATIONS, int8_kernel, linear
from inertiakv_jax.sharding import CONTEXT, DATA, expert_layout

TILE_ROWS = 16  # rows that an expert is multiplied with at a time where many are routed to it


class Kernels(NamedTuple):
    """One linear map per expert; int8 numbers have a scale."""

    values: Array  # [X, in, out]
    scales: Array | None  # [X, out] float32


class ExpertsMLP(nn.Module):
    """The MLPs of the chosen experts, added up with the router's weights.

    No token is dropped, whatever an expert's load: rows are sorted by expert, and each expert is
    multiplied with its own run of rows. On a mesh every device does so with its own experts, for
    all tokens that it shares, and the parts are added up.
    """

    config: ModelConfig
    experts: ExpertsConfig
    dtype: jnp.dtype
    int8: bool = False
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Map [..., H] to [..., H]."""
        config, experts = self.config, self.experts
        logits = linear(experts.num_experts, self.dtype, bias=False, name="router")(hidden)
        weights, chosen = route(logits, experts)
        width = config.hidden_size, experts.intermediate_size
        kernels = {
            "gate_proj": self._kernels("gate_proj", *width),
            "up_proj": self._kernels("up_proj", *width),
            "down_proj": self._kernels("down_proj", *reversed(width)),
        }
        mix = partial(_mix, activation=config.activation)
        if self.mesh is not None:
            mix = _on_mesh(mix, self.mesh, experts, hidden.shape, int8=self.int8)
        return mix(hidden, weights, chosen, kernels).astype(self.dtype)

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


def _mix(
    hidden: Array,
    weights: Array,
    chosen: Array,
    kernels: dict[str, Kernels],
    *,
    activation: str,
    experts_axis: str | None = None,
    sum_axes: tuple[str, ...] = (),
) -> Array:
    """What the experts that are here add to [..., H], float32; summed over ``sum_axes``.

    ``weights`` and ``chosen`` [..., chosen] name experts of all devices.
    """
    here = kernels["gate_proj"].values.shape[0]
    if experts_axis is not None:
        chosen = chosen - jax.lax.axis_index(experts_axis) * here
    mine = (chosen >= 0) & (chosen < here)
    expert = jnp.where(mine, chosen, here).reshape(-1)  # [tokens * chosen]
    order = jnp.argsort(expert, stable=True)  # by expert, those of other devices last
    sizes = jnp.bincount(expert, length=here).astype(jnp.int32)
    tokens = hidden.reshape(-1, hidden.shape[-1])
    outputs = grouped_mlp(
        *(tokens[order // chosen.shape[-1]], sizes),
        *(kernels["gate_proj"], kernels["up_proj"], kernels["down_proj"]),
        activation,
    )
    outputs = outputs[jnp.argsort(order)].reshape(*chosen.shape, hidden.shape[-1])
    # Rows behind the last expert here may hold anything.
    outputs = jnp.where(mine[..., None], outputs.astype(jnp.float32) * weights[..., None], 0.0)
    mixed = jnp.sum(outputs, axis=-2)
    return jax.lax.psum(mixed, sum_axes) if sum_axes else mixed


def _on_mesh(
    mix: Any, mesh: Mesh, experts: ExpertsConfig, shape: tuple[int, ...], *, int8: bool
) -> Any:
    """``mix`` on every device, for its own tokens of [B, C, H] and its own experts."""
    cut, experts_axis, width_axis = expert_layout(
        mesh, experts.num_experts, experts.intermediate_size
    )
    _, specs = kernel_specs(mesh, experts)
    if not int8:
        specs = {name: Kernels(kernel.values, None) for name, kernel in specs.items()}
    rows = [
        axis if size % cut.shape[axis] == 0 else None
        for axis, size in zip((DATA, CONTEXT), shape[:-1], strict=True)
    ]
    token = P(*rows, None)
    return jax.shard_map(
        partial(
            mix,
            experts_axis=experts_axis,
            sum_axes=tuple(axis for axis in (experts_axis, width_axis) if axis is not None),
        ),
        mesh=cut,
        in_specs=(token, token, token, specs),
        out_specs=token,
        check_vma=False,  # a loop does not say how what it carries varies
    )


def kernel_specs(mesh: Mesh | AbstractMesh, experts: ExpertsConfig) -> tuple[Any, dict[str, Any]]:
    """How the kernels lie on a mesh: the layout, and by projection specs of values and scales."""
    cut, expert, width = expert_layout(mesh, experts.num_experts, experts.intermediate_size)
    out = Kernels(P(expert, None, width), P(expert, width))  # pyright: ignore
    back = Kernels(P(expert, width, None), P(expert, None))  # pyright: ignore
    return cut, {"gate_proj": out, "up_proj": out, "down_proj": back}


def route(logits: Array, experts: ExpertsConfig) -> tuple[Array, Array]:
    """Choose each token's experts.

    Args:
      logits: [..., X], the router's.
      experts: how many of the X are chosen, and whether their weights are scaled to sum to 1.

    Returns:
      Weights [..., chosen] float32, largest first, and the experts' indices [..., chosen] int32.
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
      sizes: [X] int32, rows of each group; at most R together.
      gate: in to width.
      up: in to width.
      down: width to out.
      activation: "silu" or "gelu_tanh".

    Returns:
      [R, out]; rows behind the last group may hold anything.
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
