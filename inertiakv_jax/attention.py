"""What a model's layers talk to while decoding: a cache that stores, attends and scores.

The only door to the attention kernels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from inertiakv_jax.pallas_kernels.decode_attention.api import (
    check_implementation,
    decode_attention,
)
from inertiakv_jax.pallas_kernels.write_token.api import write_token
from inertiakv_jax.scoring import SCORERS, Attended, LearnedParams
from inertiakv_jax.sharding import (
    CACHE,
    CONTEXT,
    HEAD_PARTS,
    HEAD_ROW,
    HEAD_SLOTS,
    KV_HEADS,
    PARTIAL_HEAD_SCORES,
    PARTIAL_SCORES,
    QUERY_HEADS,
    ROW,
    SCALAR,
    SLOTS,
    TOKEN_HEADS,
    TOKEN_QUERIES,
    group_parts,
    head_parts,
)
from inertiakv_jax.state import PER_HEAD, SHARED


@dataclasses.dataclass(frozen=True)
class Execution:
    """How decode attention is run. Static; the default serves every machine.

    Attributes:
      implementation: of the kernel: None takes the best for the device that is compiled for;
        "xla", "tpu" or "gpu" names one, which raises where it cannot run.
      mesh: over which state and parameters lie, as ``sharding.layout`` cuts it; None for one
        device. The kernel then runs on each device over its own rows and heads.
      by_compiler: attention is left to the compiler's partitioner instead.
    """

    implementation: str | None = None
    mesh: Mesh | None = None
    by_compiler: bool = False

    def __post_init__(self):
        check_implementation(self.implementation)

    def of_full_cache(self) -> "Execution":
        """For step 1: where devices divide the slots, too, the compiler merges each softmax."""
        if self.mesh is None or self.mesh.shape[CONTEXT] == 1:
            return self
        return Execution("xla", self.mesh, by_compiler=True)

    @property
    def kernel_mesh(self) -> Mesh | None:
        """Where each device runs the kernel over what it has."""
        return None if self.by_compiler else self.mesh


ON_THIS_MACHINE = Execution()


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What is ranked by what: the static part of a policy.

    Attributes:
      scorer: one of ``scoring.SCORERS``.
      retention: one of ``state.RETENTIONS``.
    """

    scorer: str = "attention"
    retention: str = SHARED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeCache:
    """The cache of one decode step: one new token a row, attending to all that is held.

    Satisfies ``typing.AttentionCache``. Evicting and ageing of utilities happen once a step,
    outside; layers only add up their part of the increment, and devices only their heads' part
    of that: one sum over devices a step, none a layer.

    Leading axes ``...`` are [B] for a shared ranking, [E, B] for one a layer, [E, B, K] for one a
    kv head.
    """

    keys: tuple[Array, ...]  # L x [B, K, S, D]; [B, K, W, D] with a sliding window
    values: tuple[Array, ...]  # likewise
    slot: Array  # [...] int32, where the new token goes; S writes nowhere (a finished row)
    valid: Array  # [..., S] bool, held slots, the new token's included
    positions: Array  # [..., S] int32, places in the text, the new token's included
    position: Array  # [B] int32, place of the new token
    active: Array  # [B] bool, False for a row that has finished
    row: Array  # [B] int32, number of the row
    layer_weights: Array  # [E] float32, weight of each layer's score in the increment
    increment: Array | None  # weighted scores so far, see ``empty_increment``; None: not scored
    seed: Array | None = None  # [] uint32, of random scores
    learned: LearnedParams | None = None
    recorded: tuple[Array, ...] = ()
    """Scores of each layer by each scorer of ``record``, unweighted, layer after layer."""
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True}, default=())
    ranking: Ranking = dataclasses.field(metadata={"static": True}, default=Ranking())
    record: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())
    execution: Execution = dataclasses.field(metadata={"static": True}, default=ON_THIS_MACHINE)

    def attend(
        self,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Array, "DecodeCache"]:
        """Write one token, attend, add the layer's score. Shapes as in ``AttentionCache``, C=1."""
        eligible = self.windows[layer] is None
        index = sum(window is None for window in self.windows[:layer])
        scored = eligible and self.increment is not None
        scorers = (self.ranking.scorer,) * scored + self.record * eligible
        slots = self._layer_slots(index) if eligible else self._ring_slots(layer)
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
        attend = functools.partial(
            _attend_by_kv_head,
            scorers=scorers,
            num_heads=query.shape[2],
            num_kv_heads=key.shape[2],
            per_head=self.ranking.retention == PER_HEAD,
            soft_cap=soft_cap,
            execution=self.execution,
        )
        if self.execution.kernel_mesh is not None:
            attend = self._on_mesh(attend, slots)
        output, keys, values, scores = attend(
            (grouped, key, value),
            (self.keys[layer], self.values[layer]),
            slots,
            (self.row, self.seed, _by_kv_head(self.learned, key.shape[2])),
        )
        increment = self.increment
        if increment is not None and scored:
            score = self.layer_weights[index] * scores[0]
            increment = _add_score(increment, score, index, self.ranking.retention)
        cache = dataclasses.replace(
            self,
            keys=_replace_at(self.keys, layer, keys),
            values=_replace_at(self.values, layer, values),
            increment=increment,
            recorded=(*self.recorded, *map(self._recorded, scores[scored:])),
        )
        return output.reshape(query.shape), cache

    @property
    def total_increment(self) -> Array:
        """The increment [..., S] of all heads: one sum over devices a step."""
        assert self.increment is not None
        return self.increment.sum(axis=0)

    def _recorded(self, score: Array) -> Array:
        """A score for ``recorded``: [B, K, S] or, of each device's heads, [devices, B, S]."""
        return score.sum(axis=0) if self.ranking.retention == PER_HEAD else score

    def _layer_slots(self, index: int) -> tuple[Array, Array, Array]:
        """Slot, valid and positions of one eligible layer: [B] and [B, S], or with K."""
        slots = (self.slot, self.valid, self.positions)
        if self.ranking.retention == SHARED:
            return slots
        return slots[0][index], slots[1][index], slots[2][index]

    def _ring_slots(self, layer: int) -> tuple[Array, Array, Array]:
        """The same of a sliding window: position p lies in slot p % W."""
        window = self.windows[layer]
        assert window is not None
        positions = ring_positions(self.position, window)
        slot = jnp.where(self.active, self.position % window, window)
        return slot, positions >= 0, positions

    def _on_mesh(self, attend: Callable[..., Any], slots: tuple[Array, ...]) -> Callable[..., Any]:
        """``attend`` on every device, over its own rows and heads."""
        per_head = self.ranking.retention == PER_HEAD
        row, row_slots = (ROW, SLOTS) if slots[0].ndim == 1 else (HEAD_ROW, HEAD_SLOTS)
        learned = self.learned and LearnedParams(query=QUERY_HEADS, key=KV_HEADS)  # pyright: ignore
        return jax.shard_map(
            attend,
            mesh=self.execution.kernel_mesh,
            in_specs=(
                (TOKEN_QUERIES, TOKEN_HEADS, TOKEN_HEADS),
                CACHE,
                (row, row_slots, row_slots),
                (ROW, SCALAR, learned),
            ),
            out_specs=(
                TOKEN_QUERIES,
                CACHE,
                CACHE,
                PARTIAL_HEAD_SCORES if per_head else PARTIAL_SCORES,
            ),
            check_vma=False,  # a Pallas kernel does not say how its outputs vary
        )


def empty_increment(scores: Array, ranking: Ranking, execution: Execution) -> Array:
    """Zeros for ``DecodeCache.increment``: float32 like ``scores``.

    With a leading axis over the devices that share the heads, or with a ranking for every kv head
    over those that share its query heads: each adds up its own part.
    """
    parts = group_parts if ranking.retention == PER_HEAD else head_parts
    return jnp.zeros((parts(execution.kernel_mesh), *scores.shape), jnp.float32)


def _add_score(increment: Array, score: Array, index: int, retention: str) -> Array:
    """Add the weighted score of the eligible layer ``index`` to its ranking."""
    if retention == SHARED:
        return increment + score
    return increment.at[:, index].set(score)


def _by_kv_head(learned: LearnedParams | None, num_kv_heads: int) -> LearnedParams | None:
    """The weights for the queries as [K, G, D, features]."""
    if learned is None:
        return None
    query = learned.query.reshape(num_kv_heads, -1, *learned.query.shape[1:])
    return dataclasses.replace(learned, query=query)


def ring_positions(newest: Array, window: int) -> Array:
    """Places in the text of what a sliding window holds; below 0 where it holds nothing yet.

    Args:
      newest: [B] int32, place of the newest token.
      window: W; the token at place p lies in slot p % W.

    Returns:
      [B, W] int32, from newest - W + 1 to newest.
    """
    newest = newest[:, None]
    return newest - (newest - jnp.arange(window, dtype=jnp.int32)[None]) % window


def _attend_by_kv_head(token, cache, slots, scorer_inputs, **static):
    """``_write_and_attend`` for queries [B, 1, K, G, D] and their learned weights [K, G, D, ...].

    So both have an axis each for the devices to divide, of kv heads and of query heads of one.
    """
    (query, key, value), (row, seed, learned) = token, scorer_inputs
    if learned is not None:
        learned = dataclasses.replace(learned, query=_merged(learned.query, 0))
    output, keys, values, scores = _write_and_attend(
        (_merged(query, 2), key, value), cache, slots, (row, seed, learned), **static
    )
    return output.reshape(query.shape), keys, values, scores


def _merged(x: Array, axis: int) -> Array:
    """``x`` with the axis and the next one as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _write_and_attend(
    token: tuple[Array, Array, Array],
    cache: tuple[Array, Array],
    slots: tuple[Array, Array, Array],
    scorer_inputs: tuple[Array, Array | None, LearnedParams | None],
    *,
    scorers: tuple[str, ...],
    num_heads: int,
    num_kv_heads: int,
    per_head: bool,
    soft_cap: float | None,
    execution: Execution,
) -> tuple[Array, Array, Array, tuple[Array, ...]]:
    """One layer on one device: attention output, keys, values, and the score by each scorer.

    ``num_heads`` and ``num_kv_heads`` count those of all devices. A score is this device's part of
    the mean over heads [1, B, S], or with ``per_head`` over the query heads of each kv head
    [1, B, K, S].
    """
    (query, key, value), (keys, values), (slot, valid, positions) = token, cache, slots
    plain = "xla" if execution.implementation == "xla" else None
    keys = write_token(keys, key[:, 0], slot, implementation=plain)
    values = write_token(values, value[:, 0], slot, implementation=plain)
    output, mass = decode_attention(
        query[:, 0],
        keys,
        values,
        valid,
        soft_cap=soft_cap,
        return_mass=any(SCORERS[name].needs_mass for name in scorers),
        implementation=execution.implementation,
    )
    by_head = (x if x.ndim == 3 else x[:, None] for x in (valid, positions))
    row, seed, learned = scorer_inputs
    layer = Attended(
        query[:, 0],
        keys,
        values,
        *by_head,
        row=row,
        mass=mass,
        seed=seed,
        learned=learned,
        num_kv_heads=num_kv_heads,
        heads_axes=() if execution.kernel_mesh is None else HEAD_PARTS,
    )
    scores = tuple(SCORERS[name].score(layer) for name in scorers)
    copies = num_heads // num_kv_heads // layer.group  # devices that have this kv head
    if per_head:
        scores = tuple(score[None] / copies for score in scores)
    else:
        scores = tuple(score.sum(axis=1)[None] / (num_kv_heads * copies) for score in scores)
    return output[:, None], keys, values, scores


def _replace_at(leaves: tuple[Array, ...], index: int, leaf: Array) -> tuple[Array, ...]:
    return (*leaves[:index], leaf, *leaves[index + 1 :])
