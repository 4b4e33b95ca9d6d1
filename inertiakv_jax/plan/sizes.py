"""Bytes that weights and caches take on each device: arithmetic on shapes, nothing compiled."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from inertiakv_jax import state as kv_state
from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.partitioning import param_shardings
from inertiakv_jax.plan.layers import extrapolate, samples
from inertiakv_jax.plan.topology import MeshShape
from inertiakv_jax.plan.workload import Slots, Workload
from inertiakv_jax.sharding import MESH_AXES, expert_layout, layout, state_shardings
from inertiakv_jax.state import KVState


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes on each device.

    Attributes:
      weights: parameters.
      full_cache: keys, values and rankings after prefill.
      start_cache: likewise before decode step 1; another cache only after a prefill-time method,
        and where decoding evicts nothing, so that axis ``context`` divides the slots no more.
      kept_cache: likewise while decoding; the same cache as before if decoding evicts nothing.
    """

    weights: int
    full_cache: int
    start_cache: int
    kept_cache: int

    @property
    def peak(self) -> int:
        """The most of them at a time, temporaries not counted."""
        caches = [self.full_cache, self.kept_cache]
        if self.start_cache != self.full_cache:
            caches.append(self.full_cache + self.start_cache)
        if self.kept_cache != self.start_cache:
            caches.append(self.start_cache + self.kept_cache)
        return self.weights + max(caches)


def device_bytes(workload: Workload, slots: Slots, mesh: MeshShape) -> DeviceBytes:
    """What every device of the mesh holds."""
    model, retention, batch = workload.model, workload.policy.retention, workload.batch
    cache = functools.partial(cache_bytes, model, mesh, batch, retention)
    return DeviceBytes(
        weights=weight_bytes(model, mesh),
        full_cache=cache(slots.full, divided=True),
        start_cache=cache(slots.start, divided=slots.kept is not None),
        kept_cache=cache(slots.decode),
    )


@functools.cache
def weight_bytes(model: DecoderModel, shape: MeshShape) -> int:
    """Bytes of the parameters on a device; axes ``data`` and ``context`` repeat them.

    Counted on few layers, which is exact and quick: layers of a kind are alike.
    """
    mesh = abstract_mesh(shape)

    def count(config: ModelConfig) -> int:
        cut = dataclasses.replace(model, config=config)
        shapes = jax.eval_shape(cut.init, jax.random.key(0))
        return _local_bytes(shapes, param_shardings(cut, mesh))

    return round(extrapolate(model.config, [count(sample) for sample in samples(model.config)]))


def weight_bytes_read(model: DecoderModel, mesh: MeshShape, rows: int) -> float:
    """Bytes of the parameters that a device reads in a decode step of ``rows`` tokens.

    All of them, but not an embedding that only looks tokens up, nor experts that no token is sent
    to, if each token is sent to any of them.
    """
    config = model.config
    read = float(weight_bytes(model, mesh))
    if not config.tie_word_embeddings:
        embedding = config.vocab_size * config.hidden_size * jnp.dtype(model.dtype).itemsize
        read -= embedding / (1 if config.vocab_size % mesh.sharing else mesh.sharing)
    if config.experts is not None:
        experts = config.experts
        touched = 1 - (1 - experts.num_per_token / experts.num_experts) ** rows
        read -= (1 - touched) * _expert_bytes(model, mesh, experts)
    return read


def _expert_bytes(model: DecoderModel, shape: MeshShape, experts: ExpertsConfig) -> float:
    config = model.config
    layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    itemsize = 1 if model.quantization == "int8" else jnp.dtype(model.dtype).itemsize
    one = 3 * config.hidden_size * experts.intermediate_size * itemsize
    mesh, *axes = expert_layout(
        abstract_mesh(shape), experts.num_experts, experts.intermediate_size
    )
    return layers * experts.num_experts * one / math.prod(mesh.shape[axis] for axis in axes if axis)


@functools.cache
def cache_bytes(
    model: DecoderModel,
    mesh: MeshShape,
    batch: int,
    retention: str,
    slots: int,
    *,
    divided: bool = False,
) -> int:
    """Bytes of a ``KVState`` on a device: keys, values, and what ranks them.

    ``divided``: axis ``context`` divides the slots.
    """
    state = empty_state(model, batch, retention, slots, kept_slots=slots if divided else None)
    return _local_bytes(state, state_shardings(state, layout(abstract_mesh(mesh), model)))


def empty_state(
    model: DecoderModel, batch: int, retention: str, slots: int, kept_slots: int | None = None
) -> KVState:
    """Shapes of a state."""
    return jax.eval_shape(
        lambda: kv_state.init(
            model,
            batch,
            slots,
            budget=jnp.zeros((batch,), jnp.int32),
            retention=retention,
            kept_slots=kept_slots,
        )
    )


def abstract_mesh(mesh: MeshShape) -> AbstractMesh:
    """The mesh without devices."""
    return AbstractMesh(tuple(getattr(mesh, axis) for axis in MESH_AXES), MESH_AXES)


def _local_bytes(shapes: Any, shardings: Any) -> int:
    local = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        shapes,
        shardings,
    )
    return sum(jax.tree.leaves(local))
