"""InertiaKV (arXiv 2609.03515) in plain Python: sections 3.1, 3.2, appendix E; one row, by steps.

Where the paper is silent, "ours" marks the choice. Nothing here is fast; everything is meant to be
checked against the paper line by line.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from . import llama


@dataclass(frozen=True)
class Record:
    """What one step did. Record 0 is the prefill, record t is decode step t = 1, 2, ..."""

    token: int  # the token that this step inserted (record 0: the last prompt token)
    kept: set[int]  # positions held after the step
    evicted: list[int]  # positions dropped in the step, in the order they went
    prior: float  # utility given to the new token before it was scored
    utilities: dict[int, float]  # m by position, of all tokens held before the eviction
    scores: list[dict[int, float]] | None  # s[l] by position, per layer; None: not a refresh step
    margin: float  # relative gap in m from the last token evicted to the next in line; inf: none
    logits: np.ndarray  # [V], of the inserted token
    next_token: int  # argmax of the logits


def budget_tokens(ratio, length):
    """R = T - ceil(ratio * T), in exact arithmetic, at least 1; ``ratio`` is read as written."""
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio: expected 0 <= ratio < 1, got {ratio}")
    return max(1, length - ceil(Fraction(str(ratio)) * length))


def is_refresh_step(t, refresh):
    """Eq. 6. ``refresh``: 1 every step, r the steps with (t - 1) % r == 0, 0 only step 1."""
    return t == 1 if refresh == 0 else (t - 1) % refresh == 0


def prior_utility(utilities):
    """Utility of a new token: the mean over the tokens held (appendix E; at every step: ours)."""
    return sum(utilities.values()) / len(utilities)


def layer_scores(probabilities, positions):
    """Eq. 1: s[l, i], the mean over the query heads of p[l, n, i]; ``probabilities`` [N, held]."""
    return dict(zip(positions, np.mean(probabilities, axis=0), strict=True))


def aggregate(utilities, scores, alpha):
    """Eq. 4: m <- alpha * m + (1 - alpha) * s[l], for each layer in order, on one shared m."""
    for s in scores:
        utilities = {i: alpha * m + (1 - alpha) * s[i] for i, m in utilities.items()}
    return utilities


def choose_evicted(utilities, budget, protect_first=0, protect_recent=0):
    """The positions to drop, lowest m first, until ``budget`` are left; ties: lower position first.

    The first and the latest k positions are never candidates; the newest position is the highest.
    """
    newest = max(utilities)
    order = sorted(
        (m, i) for i, m in utilities.items() if i >= protect_first and i <= newest - protect_recent
    )
    excess = max(0, len(utilities) - budget)
    if excess > len(order):
        raise ValueError(f"budget: expected room for the protected tokens, got {budget}")
    evicted = [i for _, i in order[:excess]]
    if 0 < excess < len(order):
        (last, _), (following, _) = order[excess - 1], order[excess]
        margin = float((following - last) / max(abs(following), 1e-30))
    else:
        margin = float("inf")
    return evicted, margin


def run(
    params,
    config,
    prompt_tokens,
    *,
    steps,
    ratio=None,
    budget=None,
    alpha=0.8,
    refresh=1,
    protect_first=0,
    protect_recent=0,
    forced_tokens=None,
    dtype=np.float64,
):
    """Decodes ``steps`` tokens after a prompt.

    Args:
      params: the library's parameter tree.
      config: has the fields of ``ModelConfig``.
      prompt_tokens: T ids, without padding.
      steps: number of decode steps; step t inserts a token at position T + t - 1.
      ratio: fraction of the prompt to remove, in [0, 1); 0 never evicts (ours).
      budget: R, the number of tokens to keep; give this or ``ratio``.
      alpha: coefficient of the layer-sequential moving average.
      refresh: 1 scores every step, r every r-th from step 1 on, 0 step 1 alone (Score-Free).
      protect_first: positions 0 to this - 1 are never evicted.
      protect_recent: nor are this many latest positions, the new token included.
      forced_tokens: the tokens to insert; None inserts the argmax of the last logits.
      dtype: of all arithmetic, utilities too.

    Returns:
      ``steps + 1`` records; record 0 is the prefill.
    """
    length = len(prompt_tokens)
    if (ratio is None) == (budget is None):
        raise ValueError(f"expected one of ratio and budget, got {ratio=} and {budget=}")
    if budget is None:
        budget = float("inf") if ratio == 0 else budget_tokens(ratio, length)
    if budget < max(1, protect_first + protect_recent):
        raise ValueError(f"budget: expected room for 1 and the protected tokens, got {budget}")
    alpha = dtype(alpha)
    params = llama.cast(params, dtype)

    caches, logits = llama.prefill(params, config, prompt_tokens)
    utilities: dict[int, float] = {i: dtype(0) for i in range(length)}  # prefill scores nothing
    last = int(prompt_tokens[-1])
    records = [_record(last, utilities, [], 0.0, utilities, None, float("inf"), logits)]
    for t in range(1, steps + 1):
        token = records[-1].next_token if forced_tokens is None else int(forced_tokens[t - 1])
        position = length + t - 1

        # 1. Insert, with the mean utility. 2. Attend, the new token included.
        prior = prior_utility(utilities)
        utilities[position] = prior
        logits, probabilities = llama.step(params, config, caches, token, position)

        # 3. Score and 4. aggregate, on refresh steps only.
        scores = None
        if is_refresh_step(t, refresh):
            scores = [
                layer_scores(p, cache.positions)
                for p, cache in zip(probabilities, caches, strict=True)
            ]
            utilities = aggregate(utilities, scores, alpha)

        # 5. Evict, the same positions in every layer.
        before = dict(utilities)
        evicted, margin = choose_evicted(utilities, budget, protect_first, protect_recent)
        for i in evicted:
            del utilities[i]
            for cache in caches:
                cache.drop(i)
        records.append(_record(token, utilities, evicted, prior, before, scores, margin, logits))
    return records


def _record(token, held, evicted, prior, utilities, scores, margin, logits):
    if not np.all(np.isfinite(logits)):
        raise ValueError("logits: expected finite numbers, got NaN or infinity")
    following = int(np.argmax(logits))
    return Record(
        token, set(held), evicted, prior, dict(utilities), scores, margin, logits, following
    )
