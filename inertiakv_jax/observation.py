"""What prefill may note of the prompt's queries, for methods that score the prompt."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Observing:
    """Which queries, and what of them. Static: one more prefill program each.

    Attributes:
      last: the last so many of each row; None: all, but
      skip: not the first so many (their queries are outliers).
      moments: mean and covariance of the unrotated queries; False: what they attend to.
    """

    last: int | None = None
    skip: int = 0
    moments: bool = False

    def queries(self, positions: Array, lengths: Array) -> Array:
        """[B, C] bool, the queries that are observed, at [1, C] positions of [B, 1] lengths."""
        wanted = (positions < lengths) & (positions >= self.skip)
        return wanted if self.last is None else wanted & (positions >= lengths - self.last)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedMass:
    """What the queries of one layer attend to."""

    mass: Array  # [B, K, S] float32, probability summed over queries and group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedMoments:
    """Moments of the unrotated queries of one layer."""

    count: Array  # [B] float32, queries
    mean: Array  # [B, N, D] float32
    scatter: Array  # [B, N, D, D] float32, summed products of their deviations from the mean


Observed = ObservedMass | ObservedMoments


def nothing_observed(
    observing: Observing | None, layers: int, batch: int, num_heads: int, keys_shape: tuple
) -> tuple[Observed, ...]:
    """Empty notes on ``layers`` layers, for keys [B, K, S, D]."""
    if observing is None:
        return ()
    if observing.moments:
        head_dim = keys_shape[-1]
        empty = ObservedMoments(
            count=jnp.zeros((batch,), jnp.float32),
            mean=jnp.zeros((batch, num_heads, head_dim), jnp.float32),
            scatter=jnp.zeros((batch, num_heads, head_dim, head_dim), jnp.float32),
        )
    else:
        empty = ObservedMass(mass=jnp.zeros(keys_shape[:3], jnp.float32))
    return (empty,) * layers


def observe_mass(
    query: Array,
    keys: Array,
    normalizer: tuple[Array, Array],
    wanted: Array,
    offset: Array,
    soft_cap: float | None,
) -> Array:
    """What the wanted queries of a chunk attend to: a second pass over the keys, if any is.

    Args:
      query: [B, C, N, D].
      keys: [B, K, S, D].
      normalizer: softmax maximum and sum of each query, as of ``chunk_attention``.
      wanted: [B, C] bool.
      offset: [] int32, position of the first query, counted from that of the first key.
      soft_cap: as of ``chunk_attention``.

    Returns:
      [B, K, S] float32, probability summed over queries and group.
    """
    _, chunk, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    rows, (maximum, total) = query_rows(query, num_kv_heads), normalizer
    weight = jnp.tile(wanted.astype(jnp.float32), (1, group))[:, None, :, None] / total
    apart = jnp.tile(jnp.arange(chunk), group)[:, None] - jnp.arange(chunk)[None]

    def observe_block(index, mass):
        logits = block_logits(rows, block(keys, index, chunk), soft_cap)
        causal = (apart + (offset - index * chunk) >= 0)[None, None]
        probability = jnp.where(causal, jnp.exp(logits - maximum) * weight, 0.0)
        added = jnp.sum(probability, axis=2)
        zero = jnp.zeros_like(index)  # a literal 0 is int64 under jax_enable_x64
        start = (zero, zero, index * chunk)
        return jax.lax.dynamic_update_slice(mass, added, start)

    blocks = jnp.clip(offset // chunk + 1, 0, keys.shape[2] // chunk)
    blocks = jnp.where(jnp.any(wanted), blocks, 0)
    nothing = jnp.zeros(keys.shape[:3], jnp.float32)
    return jax.lax.fori_loop(0, blocks, observe_block, nothing)


def observe_moments(
    seen: ObservedMoments, query: Array, rotary: tuple[Array, Array], wanted: Array
) -> ObservedMoments:
    """Merge mean and scatter of the wanted queries, unrotated (Chan et al. 1983, stable).

    Args:
      seen: notes so far.
      query: [B, C, N, D], rotated.
      rotary: cosine and sine of each query's angles, [B, C, 1, D / 2] float32.
      wanted: [B, C] bool.
    """
    x = unrotate(query.astype(jnp.float32), rotary)
    weight = wanted.astype(jnp.float32)
    count = jnp.sum(weight, axis=1)
    mean = jnp.einsum("bc,bcnd->bnd", weight, x) / jnp.maximum(count, 1.0)[:, None, None]
    centred = (x - mean[:, None]) * weight[:, :, None, None]
    scatter = jnp.einsum("bcni,bcnj->bnij", centred, x - mean[:, None])
    total = seen.count + count
    share = (count / jnp.maximum(total, 1.0))[:, None, None]
    apart = mean - seen.mean
    between = (seen.count[:, None, None] * share * apart)[..., None] * apart[..., None, :]
    return ObservedMoments(
        count=total,
        mean=seen.mean + share * apart,
        scatter=seen.scatter + scatter + between,
    )


def unrotate(x: Array, rotary: tuple[Array, Array]) -> Array:
    """Undo the rotation of [B, C, heads, D]: pairs (i, i + D / 2), angles in [B, C, 1, D / 2].

    Where cosine and sine are scaled (YaRN), so is what comes back: the factor is undone, too.
    """
    cosine, sine = rotary
    first, second = jnp.split(x, 2, axis=-1)
    square = cosine * cosine + sine * sine
    back = [first * cosine + second * sine, second * cosine - first * sine]
    return jnp.concatenate([part / square for part in back], axis=-1)


def query_rows(query: Array, num_kv_heads: int) -> Array:
    """[B, C, N, D] to [B, K, G * C, D]: all queries of a kv head as rows of one product, scaled."""
    batch, chunk, num_heads, head_dim = query.shape
    group = num_heads // num_kv_heads
    rows = query.reshape(batch, chunk, num_kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, group * chunk, head_dim)
    return rows * jnp.asarray(head_dim**-0.5, rows.dtype)


def block(cache: Array, index: Array, size: int) -> Array:
    """Block ``index`` of [B, K, S, D], counted around where the cache is a ring."""
    index = index % (cache.shape[2] // size)
    return jax.lax.dynamic_slice_in_dim(cache, index * size, size, axis=2)


def block_logits(rows: Array, key: Array, soft_cap: float | None) -> Array:
    """Logits [B, K, Q, C] float32 of scaled query rows [B, K, Q, D] and keys [B, K, C, D]."""
    logits = jnp.einsum("bkqd,bksd->bkqs", rows, key, preferred_element_type=jnp.float32)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
