"""How a decoder's parameters lie over a mesh of devices."""

import re

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.sharding import MODEL
from inertiakv_jax.typing import Params

EXPERT = "expert"
"""Mesh axis over which experts are split; a mesh without it splits them over ``MODEL``."""

# Which axis of a parameter is split over MODEL, by the end of its path: the outputs of the first
# maps, the inputs of the last ones, so that each device works on its own heads and its own part of
# the MLP, and sums are formed after ``o_proj`` and ``down_proj`` only.
_AXES = (
    (r"embed/embedding", 0),
    (r"lm_head/kernel", -1),
    (r"[qkv]_proj/(kernel|bias|scale)", -1),
    (r"o_proj/kernel", -2),
    (r"(gate|up)_proj/(kernel|bias|scale)", -1),
    (r"down_proj/kernel", -2),
)


def param_shardings(model: DecoderModel, mesh: Mesh) -> Params:
    """One ``NamedSharding`` per parameter, for ``load_params`` and for jit.

    A parameter whose heads, or whose axis, the mesh does not divide lies on every device whole.

    Args:
      model: the decoder.
      mesh: with axis ``sharding.MODEL``, and ``EXPERT`` if experts are to be split by themselves.

    Returns:
      A pytree of the structure of ``model.init``.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = "/".join(key.key for key in path)
        return NamedSharding(mesh, _spec(name, leaf.shape, model.config, mesh))

    return jax.tree.map_with_path(sharding, shapes)


def _spec(name: str, shape: tuple[int, ...], config: ModelConfig, mesh: Mesh) -> P:
    stacked = len(shape) - (1 if name.endswith(("scale", "bias")) else 2)
    if "/mlp/" in name and stacked == 1:
        axis = EXPERT if EXPERT in mesh.shape else MODEL
        return P(axis) if shape[0] % mesh.shape[axis] == 0 else P()
    devices = mesh.shape[MODEL]
    heads = config.num_heads if re.search(r"[qo]_proj/", name) else config.num_kv_heads
    if "/attention/" in name and heads % devices:
        return P()
    for pattern, axis in _AXES:
        if re.search(pattern + "$", name):
            parts: list[str | None] = [None] * len(shape)
            parts[axis] = MODEL
            return P() if shape[axis] % devices else P(*parts)
    return P()
