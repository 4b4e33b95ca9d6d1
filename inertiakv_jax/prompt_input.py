"""What ``prefill`` is given, checked before anything is compiled."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh

from inertiakv_jax.distributed import fetch
from inertiakv_jax.sharding import missing_rows
from inertiakv_jax.typing import Model


def checked_prompts(
    model: Model,
    tokens: Array | np.ndarray,
    lengths: Array | np.ndarray,
    max_new_tokens: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of ``prefill`` as NumPy arrays, or its ValueError."""
    if isinstance(lengths, Tracer) or isinstance(tokens, Tracer):
        raise ValueError(
            "prefill needs concrete tokens and lengths, since they set the capacity; call it "
            "outside jit (it compiles itself)"
        )
    tokens, lengths = fetch(tokens), fetch(lengths)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens must be int [B, T], got {tokens.dtype} {tokens.shape}")
    if tokens.shape[0] == 0:
        raise ValueError("the batch is empty: tokens must have at least one row")
    if lengths.shape != tokens.shape[:1] or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"lengths must be int [{tokens.shape[0]}], got {lengths.dtype} {lengths.shape}"
        )
    if lengths.max() > tokens.shape[1]:
        raise ValueError(f"length {lengths.max()} exceeds the {tokens.shape[1]} tokens given")
    check_lengths(model, lengths, max_new_tokens)
    ids = tokens[is_prompt(tokens, lengths)]
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        raise ValueError(
            f"tokens must be ids in 0 .. {model.vocab_size - 1}, got {ids.min()} .. {ids.max()}"
        )
    return tokens, lengths.astype(np.int32)


def is_prompt(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B, T] bool, False for padding, which may hold what is no id (-100).

    A model makes NaN of such an id, and NaN spreads even from a value with weight 0.
    """
    return np.arange(tokens.shape[1])[None] < lengths[:, None]


def check_lengths(model: Model, lengths: np.ndarray, max_new_tokens: int | None) -> None:
    """Raise ValueError unless prompts of [B] lengths, and the new tokens, fit the model."""
    if lengths.min() < 1:
        raise ValueError(f"row {int(lengths.argmin())} has an empty prompt")
    if max_new_tokens is not None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer):
            raise ValueError(f"max_new_tokens must be an integer, got {max_new_tokens!r}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    longest, new = int(lengths.max()), max_new_tokens or 0
    if longest + new > model.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new} new ones exceed the model's "
            f"{model.max_positions} positions"
        )


def checked_rows(rows: Sequence[int] | np.ndarray, batch: int) -> Array:
    """Numbers of the rows, [B] int32; or a ValueError."""
    rows = np.asarray(rows)
    if rows.shape != (batch,) or not np.issubdtype(rows.dtype, np.integer) or rows.min() < 0:
        raise ValueError(f"rows must be {batch} integers from 0 on, got {rows.dtype} {rows}")
    return jnp.asarray(rows % 2**31, jnp.int32)


def filled_up(
    tokens: np.ndarray, lengths: np.ndarray, mesh: Mesh | None
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [B, T] and lengths [B], the last one repeated until axis "data" divides them."""
    added = missing_rows(mesh, len(lengths))
    return np.pad(tokens, ((0, added), (0, 0)), "edge"), np.pad(lengths, (0, added), "edge")
