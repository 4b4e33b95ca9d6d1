"""Methods that thin out the prompt's cache once, between prefill and the first decode step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from inertiakv_jax.budget import check_budget, token_budgets
from inertiakv_jax.checks import (
    check_choice,
    check_field,
    in_unit_interval,
    is_count,
    is_int32_count,
)
from inertiakv_jax.state import PER_HEAD, RETENTIONS, num_eligible
from inertiakv_jax.typing import Model, RotaryModel

SNAPKV, EXPECTED_ATTENTION, KVZIP = "snapkv", "expected-attention", "kvzip"
PREFILL_SCORERS = (SNAPKV, EXPECTED_ATTENTION, KVZIP, "keydiff", "knorm")
HEAD_BUDGETS = ("equal", "layer", "model")
MAX_POOL = 1025
"""Each of a pool's neighbours is one more term in the program."""


@dataclasses.dataclass(frozen=True)
class PrefillMethod:
    """What is scored of a prompt, and how much of it stays. Hashable, static.

    Give the budget one way: ``ratio``, ``tokens`` or ``kv_bytes``, as of ``Policy``.

    Attributes:
      scorer: "snapkv": attention of the prompt's last ``window`` queries, pooled;
        "expected-attention": attention of the next 512 queries, from the moments of the prompt's;
        "kvzip": the most attention a token gets while the prompt is read a second time, to repeat
        it; "keydiff" and "knorm": as of ``scoring``.
      ratio: fraction of the prompt removed, in [0, 1).
      tokens: tokens a row keeps.
      kv_bytes: bytes of keys and values a row keeps.
      retention: one ranking per kv head ("per_head"), per layer, or for all layers ("shared"), of
        the mean score. A decode-time policy that follows needs the same retention.
      head_budgets: "equal": every kv head keeps as many tokens; "layer": the heads of a layer
        share their budgets out by score (Ada-KV), each keeping ``safeguard`` of its own; "model":
        so do all heads of all layers (KVzip). Only per head. The cache is as long as the longest
        head; in the others the rest is masked, not freed.
      safeguard: in [0, 1], see "layer".
      window: the last so many tokens stay, for SnapKV, whose queries they are.
      pool: odd width of the mean that SnapKV takes of neighbours' scores.
      protect_first: the first so many tokens stay.
      repeat_first: ids that ask for the prompt's repetition, for KVzip; ``generate`` fills them in.
      repeat_next: ids that ask for a later part of it, starting after the 8 tokens that follow.
      repeat_suffix: ids that end either request, as the chat template ends a question.

    Source: SnapKV arXiv 2404.14469; Ada-KV arXiv 2407.11550; Expected Attention arXiv 2510.00636;
    KVzip arXiv 2505.23416.
    """

    scorer: str
    ratio: float | None = None
    tokens: int | None = None
    kv_bytes: int | None = None
    retention: str = PER_HEAD
    head_budgets: str = "equal"
    safeguard: float = 0.2
    window: int = 64
    pool: int = 5
    protect_first: int = 0
    repeat_first: tuple[int, ...] = ()
    repeat_next: tuple[int, ...] = ()
    repeat_suffix: tuple[int, ...] = ()

    def __post_init__(self):
        check_budget(self)
        check_choice(self, "scorer", PREFILL_SCORERS)
        check_choice(self, "retention", RETENTIONS)
        check_choice(self, "head_budgets", HEAD_BUDGETS)
        if self.head_budgets != "equal" and self.retention != PER_HEAD:
            raise ValueError(
                f"head_budgets={self.head_budgets!r} needs retention 'per_head', got "
                f"{self.retention!r}"
            )
        check_field(self, "safeguard", lambda x: in_unit_interval(x) or x == 1, "in [0, 1]")
        for name in ("window", "protect_first"):
            check_field(self, name, is_int32_count, "an integer in 0 .. 2**31 - 1")
        check_field(
            self,
            "pool",
            lambda x: is_count(x) and x % 2 == 1 and x <= MAX_POOL,
            f"an odd integer in 1 .. {MAX_POOL}",
        )
        for name in ("repeat_first", "repeat_next", "repeat_suffix"):
            check_field(self, name, _is_ids, "a tuple of token ids")
        if self.scorer == SNAPKV and self.window < 1:
            raise ValueError(f"SnapKV needs a window of at least 1 query, got {self.window}")

    def check(self, lengths: Sequence[int] | np.ndarray, model: Model) -> None:
        """Raise ValueError for a model, or prompts, that the method does not work with."""
        self.budgets(lengths, model)
        if self.scorer == EXPECTED_ATTENTION and not isinstance(model, RotaryModel):
            raise ValueError(
                "expected-attention undoes the rotation of queries: the model needs a method "
                "rotary(positions), see typing.RotaryModel"
            )
        if self.scorer == KVZIP and num_eligible(model) != model.num_layers:
            raise ValueError(
                "kvzip reads the prompt a second time, before which a model with sliding windows "
                "has forgotten most of it"
            )

    def budgets(self, lengths: Sequence[int] | np.ndarray, model: Model) -> np.ndarray:
        """Tokens that each row keeps of its prompt, [B] int32, per kv head on average."""
        return np.minimum(token_budgets(self, lengths, model), np.asarray(lengths, np.int32))


def _is_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(is_count(token) for token in value)
