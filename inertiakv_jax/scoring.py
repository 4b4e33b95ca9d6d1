"""Scorers: one number per held token, layer and kv head; larger means keep.

A scorer sees one layer of one step, on one device perhaps only some of its heads. What it returns
is per kv head, such that the mean over all K heads is the token's score in the layer; a ranking per
head takes the numbers as they are. Dead slots come back as 0. All is float32.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnedParams:
    """Weights of the learned scorer: one pair for all layers, 64 features (appendix E)."""

    query: Array  # [N, D, features] float32, W_q
    key: Array  # [K, D, features] float32, W_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attended:
    """One layer after its attention: what a scorer may look at."""

    query: Array  # [B, N, D]
    keys: Array  # [B, K, S, D]; dead slots may hold NaN
    values: Array  # [B, K, S, D]; likewise
    valid: Array  # [B, 1 or K, S] bool
    positions: Array  # [B, 1 or K, S] int32
    row: Array  # [B] int32, number of the row, which random scores are drawn for
    mass: Array | None  # [B, K, S] float32, attention probability summed over each group of heads
    seed: Array | None = None  # [] uint32, of random scores
    learned: LearnedParams | None = None
    num_kv_heads: int | None = dataclasses.field(metadata={"static": True}, default=None)
    """Of all devices; None: those that are here."""
    heads_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())
    """Mesh axes over which heads are split, inside ``jax.shard_map``."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, K, S)."""
        batch, num_kv_heads, slots, _ = self.keys.shape
        return batch, num_kv_heads, slots

    @property
    def group(self) -> int:
        """G, query heads of a kv head."""
        return self.query.shape[1] // self.keys.shape[1]

    @property
    def attention(self) -> Array:
        """[B, K, S]: mean probability over each group of query heads."""
        assert self.mass is not None
        return self.mass / self.group

    def sum_devices(self, x: Array) -> Array:
        """Sum of ``x`` over the devices that share the heads."""
        return jax.lax.psum(x, self.heads_axes) if self.heads_axes else x

    def masked(self, x: Array) -> Array:
        """[B, K, S] with 0 in dead slots."""
        return jnp.where(self.valid, x, 0.0)

    def mean_held(self, x: Array) -> Array:
        """[B, K, S, ...] averaged over the slots held, which are kept as an axis of 1."""
        valid = self.valid.reshape(self.valid.shape + (1,) * (x.ndim - 3))
        held = jnp.maximum(jnp.sum(valid, axis=2, keepdims=True), 1).astype(jnp.float32)
        return jnp.sum(jnp.where(valid, x, 0.0), axis=2, keepdims=True) / held


def attention(layer: Attended) -> Array:
    """Mean softmax probability: s[i] = mean over all N heads of p[n, i].

    Source: arXiv 2609.03515 eq. 1; under grouped-query attention the mean runs over all N heads.
    """
    return layer.attention


def vnorm(layer: Attended) -> Array:
    """Attention times the value's norm, which is relative to the mean over its head.

    Source: arXiv 2609.03515 section 5.1.
    """
    norm = jnp.linalg.norm(layer.values.astype(jnp.float32), axis=-1)
    mean = layer.mean_held(norm)
    return layer.masked(layer.attention * norm / jnp.where(mean > 0.0, mean, 1.0))


def entropy(layer: Attended) -> Array:
    """Attention times the normalised entropy of the layer's head-mean distribution.

    A layer that looks everywhere has 1, one that looks at one token 0; one token alone, 1 (ours).

    Source: arXiv 2609.03515 section 5.1.
    """
    devices = layer.sum_devices(jnp.float32(1.0))
    mean = layer.sum_devices(jnp.mean(layer.attention, axis=1)) / devices
    held = jnp.sum(jnp.any(layer.valid, axis=1), axis=-1).astype(jnp.float32)
    total = jnp.sum(jax.scipy.special.entr(mean), axis=-1)
    weight = jnp.where(held > 1.0, total / jnp.log(jnp.maximum(held, 2.0)), 1.0)
    return weight[:, None, None] * layer.attention


def keydiff(layer: Attended) -> Array:
    """Minus the cosine of a key with the mean of the normalised keys of its head.

    Source: KeyDiff, arXiv 2504.15364, section 3.
    """
    keys = layer.keys.astype(jnp.float32)
    unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
    anchor = layer.mean_held(unit)
    length = jnp.maximum(jnp.linalg.norm(anchor, axis=-1), 1e-12)
    return layer.masked(-jnp.sum(unit * anchor, axis=-1) / length)


def knorm(layer: Attended) -> Array:
    """Minus the l2 norm of the key.

    Source: arXiv 2406.11430.
    """
    return layer.masked(-jnp.linalg.norm(layer.keys.astype(jnp.float32), axis=-1))


def recency(layer: Attended) -> Array:
    """The position: the oldest goes first. Exact up to 2**24 tokens."""
    return jnp.broadcast_to(layer.masked(layer.positions.astype(jnp.float32)), layer.shape)


def random(layer: Attended) -> Array:
    """A hash of seed, row and position in [0, 1): a token always has the same score."""
    assert layer.seed is not None
    row = layer.row.astype(jnp.uint32)[:, None, None]
    bits = _mix(_mix(layer.positions.astype(jnp.uint32) ^ _mix(row ^ _mix(layer.seed))))
    uniform = (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
    return jnp.broadcast_to(layer.masked(uniform), layer.shape)


def learned(layer: Attended) -> Array:
    """The learned bilinear form <W_k k[i], W_q q> / sqrt(features), over the concatenated heads.

    Linear in the keys, so that each kv head gives its own part; the query is summed first.

    Source: arXiv 2609.03515 section 5.1, appendix E.
    """
    if layer.learned is None:
        raise ValueError("the learned scorer needs its weights: Policy(scorer_params=...)")
    weights, features = layer.learned, layer.learned.query.shape[-1]
    query = jnp.einsum("bnd,ndf->bf", layer.query.astype(jnp.float32), weights.query)
    query = layer.sum_devices(query) * features**-0.5
    direction = jnp.einsum("bf,kdf->bkd", query, weights.key)
    score = jnp.einsum("bkd,bksd->bks", direction, layer.keys.astype(jnp.float32))
    heads = layer.num_kv_heads or layer.shape[1]  # the mean over K must be the sum
    return layer.masked(score * float(heads))


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A scorer and what it needs."""

    score: Callable[[Attended], Array]
    needs_mass: bool = False  # the attention kernel must return its probability mass


SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        "attention": Scorer(attention, needs_mass=True),
        "vnorm": Scorer(vnorm, needs_mass=True),
        "entropy": Scorer(entropy, needs_mass=True),
        "keydiff": Scorer(keydiff),
        "knorm": Scorer(knorm),
        "recency": Scorer(recency),
        "random": Scorer(random),
        "learned": Scorer(learned),
    }
)
"""By name, as in policies and YAML."""


def _mix(bits: Array) -> Array:
    """Spread 32 bits: a bijection in which every input bit reaches every output bit.

    Source: the finaliser of MurmurHash3 (public domain).
    """
    bits = bits.astype(jnp.uint32)
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> jnp.uint32(16))
