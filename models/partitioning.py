"""How a decoder's parameters lie over a mesh of devices."""

import math
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.experts import kernel_specs
from inertiakv_jax.sharding import HEAD_PARTS, HEADS, SHARING, layout
from inertiakv_jax.typing import Params

# Which axis of a parameter is split over which devices, by the end of its path: the outputs of the
# first maps, the inputs of the last ones, so that each device works on its own heads and its own
# part of the MLP, and sums are formed after ``o_proj`` and ``down_proj`` only.
_SPLIT = (
    (r"embed/embedding", 0, SHARING),
    (r"lm_head/kernel", -1, SHARING),
    (r"q_proj/(kernel|bias|scale)", -1, HEAD_PARTS),
    (r"[kv]_proj/(kernel|bias|scale)", -1, (HEADS,)),
    (r"o_proj/kernel", -2, HEAD_PARTS),
    (r"(gate|up)_proj/(kernel|bias|scale)", -1, SHARING),
    (r"down_proj/kernel", -2, SHARING),
)


def param_shardings(model: DecoderModel, mesh: Mesh | AbstractMesh) -> Params:
    """One ``NamedSharding`` per parameter, for ``load_params`` and for jit.

    A width that the devices do not divide lies on every one of them whole.

    Args:
      model: the decoder.
      mesh: with some of the axes ``sharding.MESH_AXES``.

    Returns:
      A pytree of the structure of ``model.init``.

    Raises:
      ValueError: the mesh has another axis.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    cut, config = layout(mesh, model), model.config

    def sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = "/".join(key.key for key in path)
        if config.experts is not None and _is_of_experts(name, leaf.shape):
            experts, specs = kernel_specs(mesh, config.experts)
            *_, projection, kind = name.split("/")
            kernel = specs[projection]
            return NamedSharding(experts, kernel.values if kind == "kernel" else kernel.scales)
        return NamedSharding(cut, _spec(name, leaf.shape, cut))

    return jax.tree.map_with_path(sharding, shapes)


def _is_of_experts(name: str, shape: tuple[int, ...]) -> bool:
    axes_of_one = 1 if name.endswith(("scale", "bias")) else 2
    return "/mlp/" in name and len(shape) == axes_of_one + 1


def _spec(name: str, shape: tuple[int, ...], cut: Any) -> P:
    parts: list[tuple[str, ...] | None] = [None] * len(shape)
    for pattern, axis, names in _SPLIT:
        if re.search(pattern + "$", name):
            devices = math.prod(cut.shape[name] for name in names)
            if shape[axis] % devices == 0:
                parts[axis] = names
    return P(*parts)
