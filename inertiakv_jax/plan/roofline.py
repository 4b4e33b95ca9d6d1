"""How fast a decode step can be at most: bytes over bandwidth, operations over peak."""

import dataclasses

import jax.numpy as jnp

from inertiakv_jax.plan.chips import Chip
from inertiakv_jax.plan.collectives import sent
from inertiakv_jax.plan.sizes import cache_bytes, weight_bytes_read
from inertiakv_jax.plan.topology import MeshShape
from inertiakv_jax.plan.workload import Workload
from inertiakv_jax.state import PER_HEAD, PER_LAYER, num_eligible


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time of one decode step.

    A device reads its weights and its cache and computes at the same time; what it exchanges with
    others comes on top, since each layer waits for it.

    Attributes:
      weights_read: bytes, on each device.
      cache_read: bytes, likewise.
      memory_seconds: to read both.
      compute_seconds: of the multiplications.
      exchange_seconds: of the collectives, without their latency.
      tokens_per_second: of the whole batch.
    """

    weights_read: float
    cache_read: float
    memory_seconds: float
    compute_seconds: float
    exchange_seconds: float
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max(self.memory_seconds, self.compute_seconds) + self.exchange_seconds


def roofline(
    workload: Workload,
    chip: Chip,
    mesh: MeshShape,
    slots: int,
    *,
    rows: int,
    sent_bytes: float,
) -> Roofline:
    """Of a step over a cache of ``slots``.

    Args:
      workload: its batch is padded for the mesh.
      chip: of every device.
      mesh: over which they lie.
      slots: S, all of which are read.
      rows: those of the batch that somebody waits for.
      sent_bytes: that each device sends to others in a step.
    """
    model, local_rows = workload.model, workload.batch // mesh.data
    weights = weight_bytes_read(model, mesh, local_rows)
    cache = cache_bytes(model, mesh, workload.batch, workload.policy.retention, slots)
    memory = (weights + cache) / chip.bandwidth
    compute = _operations(workload, slots) / (mesh.data * mesh.sharing) / chip.flops
    exchange = sent_bytes / chip.links
    return Roofline(
        weights_read=weights,
        cache_read=cache,
        memory_seconds=memory,
        compute_seconds=compute,
        exchange_seconds=exchange,
        tokens_per_second=rows / (max(memory, compute) + exchange),
    )


def expected_sent_bytes(workload: Workload, mesh: MeshShape) -> float:
    """Bytes that a device sends in a step that does not score, before anything is compiled.

    A sum after each attention and each MLP, and one of the embedding.
    """
    config = workload.config
    rows = workload.batch // mesh.data
    one = rows * config.hidden_size * jnp.dtype(workload.dtype).itemsize
    return (2 * config.num_layers + 1) * sent("all-reduce", one, mesh.sharing)


def score_sent_bytes(workload: Workload, mesh: MeshShape, slots: int) -> float:
    """What a step that scores sends on top: one sum of the scores of each ranking."""
    retention = workload.policy.retention
    if retention == PER_HEAD:
        return 0.0
    rankings = num_eligible(workload.model) if retention == PER_LAYER else 1
    rows = workload.batch // mesh.data
    return sent("all-reduce", rankings * rows * slots * 4, mesh.sharing)


def _operations(workload: Workload, slots: int) -> float:
    """Multiplications and additions of a step, all devices and rows together."""
    config = workload.config
    width = config.num_heads * config.head_dim
    projections = 2 * config.hidden_size * (width + config.num_kv_heads * config.head_dim)
    total = config.vocab_size * config.hidden_size  # of the logits
    for layer, window in enumerate(config.sliding_windows):
        mlp = config.intermediate_size
        if config.experts is not None and config.has_experts(layer):
            mlp = config.experts.num_per_token * config.experts.intermediate_size
        attention = 2 * width * (slots if window is None else window)
        total += projections + 3 * config.hidden_size * mlp + attention
    return 2.0 * total * workload.batch
