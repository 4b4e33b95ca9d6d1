"""Choosing the next token from logits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_NUMBER = int | float | np.number
_NO_NUMBER = str | bytes | bool | complex | list | tuple | dict | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to draw a token. All fields are traced: changing them compiles nothing.

    The filters apply in this order, each to what the one before left: ``top_k``, ``top_p``,
    ``min_p``; then one token is drawn at ``temperature``. top_p and min_p see the probabilities
    at that temperature, as in Hugging Face transformers.

    Args:
      temperature: above 0; 1 samples the model's own distribution.
      top_k: keep the k most likely tokens (ties with the k-th stay); 0 keeps all.
      top_p: in (0, 1], keep the smallest set of most likely tokens whose probability reaches it.
      min_p: in [0, 1], keep tokens at least this fraction as likely as the most likely one.

    Raises:
      ValueError: no number, or one out of its range, by name.
    """

    temperature: float | Array = 1.0
    top_k: int | Array = 0
    top_p: float | Array = 1.0
    min_p: float | Array = 0.0

    def __post_init__(self):
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        # Inside jit the fields are tracers, checked when they were numbers, and jax makes trees of
        # placeholders of its own: only what users write is refused.
        for field in dataclasses.fields(self):
            check(field.name, not isinstance(getattr(self, field.name), _NO_NUMBER), "a number")
        if isinstance(self.temperature, _NUMBER):
            check("temperature", 0.0 < self.temperature < float("inf"), "above 0 and finite")
        if isinstance(self.top_k, _NUMBER):
            good = 0 <= self.top_k < float("inf") and int(self.top_k) == self.top_k
            check("top_k", good, "an integer >= 0")
            check("top_k", self.top_k < 2**31, "below 2**31")
        if isinstance(self.top_p, _NUMBER):
            check("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        if isinstance(self.min_p, _NUMBER):
            check("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")


def check_sampling(sampling: Any) -> None:
    """Raise ValueError unless it is a ``Sampling`` or None."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a Sampling or None (greedy), got {sampling!r}")


def sample(logits: Array, sampling: Sampling | None, key: Array | None, step: Array) -> Array:
    """Pick one token a row.

    Args:
      logits: [B, V] float32.
      sampling: None takes the most likely token (the lowest id of equals).
      key: PRNG key; unused and may be None when ``sampling`` is None.
      step: [] int32; the draw depends on (key, step, row) alone, so a run that is cut in chunks,
        or resumed, draws the same tokens.

    Returns:
      [B] int32 token ids.
    """
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if key is None:
        raise ValueError("sampling needs a PRNG key, got None; pass key=jax.random.key(seed)")
    step_key = jax.random.fold_in(key, step)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    row_keys = jax.vmap(lambda row: jax.random.fold_in(step_key, row))(rows)
    filtered = filter_logits(logits, sampling)
    return jax.vmap(jax.random.categorical)(row_keys, filtered).astype(jnp.int32)


def filter_logits(logits: Array, sampling: Sampling) -> Array:
    """Divide [B, V] logits by the temperature and set what the filters drop to -inf."""
    vocabulary = logits.shape[-1]
    # Below this all is greedy already, and several logits would reach infinity and tie.
    scaled = logits / jnp.maximum(jnp.float32(sampling.temperature), 1e-30)
    descending = -jnp.sort(-scaled, axis=-1)

    rank = jnp.arange(vocabulary, dtype=jnp.int32)[None]
    top_k = jnp.where(jnp.int32(sampling.top_k) > 0, jnp.int32(sampling.top_k), vocabulary)
    kept = jnp.where(rank < top_k, descending, -jnp.inf)

    probabilities = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Sums round: the most likely token stays for any top_p, and the least likely at top_p 1.
    top_p = jnp.float32(sampling.top_p)
    kept = jnp.where((before < top_p) | (rank == 0) | (top_p >= 1.0), kept, -jnp.inf)

    best = descending[:, :1]
    floor = best + jnp.log(jnp.float32(sampling.min_p))
    kept = jnp.where(kept >= floor, kept, -jnp.inf)

    smallest = jnp.min(jnp.where(jnp.isfinite(kept), kept, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= smallest, scaled, -jnp.inf)
