"""The methods: each a point in the space of ``Policy``.

Every maker takes the fraction of the prompt to remove (``ratio``; or ``tokens`` or ``kv_bytes``;
0.9 if nothing is given), and any other field of ``Policy`` to vary the method.

Deviations common to all from other libraries: keys keep the rotation of their place in the text; no
token is protected unless a field says so, and then by a mask, not a score; ties go by position; the
token of a step is inserted before it is scored, and may go in its own step.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from inertiakv_jax.aggregation import RULES
from inertiakv_jax.checks import is_integer
from inertiakv_jax.policy import EVERY_STEP, STEP_ONE_ONLY, Policy
from inertiakv_jax.prefill_method import EXPECTED_ATTENTION, KVZIP, SNAPKV, PrefillMethod
from inertiakv_jax.state import NO_EVICTION, PER_HEAD, PER_LAYER

DEFAULT_RATIO = 0.9


def full() -> Policy:
    """Keep the full cache: nothing is scored, nothing is evicted."""
    return Policy("full", ratio=0.0)


def _full(ratio: float | None = None, **options: Any) -> Policy:
    _make("full", ratio, options)  # refuses what is out of range, though nothing of it is used
    return full()


def inertiakv(ratio: float | None = None, **options: Any) -> Policy:
    """InertiaKV: utilities are a moving average of attention, rescored every step.

    Source: arXiv 2609.03515 section 3.2.
    """
    refresh = options.get("refresh", EVERY_STEP)
    names = {EVERY_STEP: "inertiakv", STEP_ONE_ONLY: "score-free"}
    name = names.get(refresh) if is_integer(refresh) else None  # a list has no hash
    return _make(name or f"lazy{refresh}", ratio, options)


def lazy(refresh: int, ratio: float | None = None, **options: Any) -> Policy:
    """InertiaKV-Lazy: rescore every ``refresh`` steps, evict at every one (eq. 6)."""
    if not is_integer(refresh) or refresh < 1:
        raise ValueError(f"refresh must be an integer >= 1, got {refresh!r}")
    return _make(f"lazy{refresh}", ratio, options | {"refresh": refresh})


def score_free(ratio: float | None = None, **options: Any) -> Policy:
    """Score-Free: score at step 1 only, evict at every step."""
    refresh = options.setdefault("refresh", STEP_ONE_ONLY)
    if refresh != STEP_ONE_ONLY:
        raise ValueError(f"score-free never rescores: refresh must be 0, got {refresh!r}")
    return _make("score-free", ratio, options)


def single_step(ratio: float | None = None, **options: Any) -> Policy:
    """The last step's attention, mean over all layers, no memory (arXiv 2609.03515, ablation)."""
    return _make("single-step", ratio, options, **RULES["single-step"])


def cumulative(ratio: float | None = None, **options: Any) -> Policy:
    """The sum of all steps' attention, one ranking (arXiv 2609.03515 eq. 3)."""
    return _make("cumulative", ratio, options, **RULES["cumulative"])


def tova(ratio: float | None = None, **options: Any) -> Policy:
    """TOVA: the last step's attention, mean over heads, one ranking a layer.

    Source: arXiv 2401.06104. kvpress exempts the newest token (``protect_recent=1``); the paper
    does not.
    """
    return _make("tova", ratio, options, retention=PER_LAYER, decay=0.0)


def h2o(ratio: float | None = None, **options: Any) -> Policy:
    """H2O: the attention of all queries so far, added up per head; half the budget is the latest.

    Source: arXiv 2306.14048. Deviation: under grouped-query attention a kv head has one ranking, of
    its query heads' mean. Scoring the prompt's queries makes a second pass of their attention.
    """
    return _make(
        "h2o",
        ratio,
        options,
        retention=PER_HEAD,
        decay=1.0,
        recent_fraction=0.5,
        prompt_queries=NO_EVICTION,
    )


def keydiff(ratio: float | None = None, **options: Any) -> Policy:
    """KeyDiff: keys least like the mean key stay, per head.

    Source: arXiv 2504.15364. Deviation: applied at decode steps, as in arXiv 2609.03515, not while
    the prompt is read in blocks.
    """
    return _make("keydiff", ratio, options, scorer="keydiff", retention=PER_HEAD, decay=0.0)


def knorm(ratio: float | None = None, **options: Any) -> Policy:
    """KNorm: keys of the smallest norm stay, per head.

    Source: arXiv 2406.11430. Deviation: applied at decode steps; no layer is exempt.
    """
    return _make("knorm", ratio, options, scorer="knorm", retention=PER_HEAD, decay=0.0)


def streaming_llm(ratio: float | None = None, **options: Any) -> Policy:
    """StreamingLLM: the first four tokens (sinks) and the latest.

    Source: arXiv 2309.17453. Deviation: positions are those of the text, gaps and all, where the
    paper re-numbers those of the cache.
    """
    return _make("streaming-llm", ratio, options, scorer="recency", decay=0.0, protect_first=4)


def random(ratio: float | None = None, **options: Any) -> Policy:
    """Random tokens stay; a token's draw depends on ``seed``, its row and its position alone."""
    return _make("random", ratio, options, scorer="random")


def recency(ratio: float | None = None, **options: Any) -> Policy:
    """The latest tokens stay (arXiv 2609.03515 section 5.1): a sliding window, no sinks."""
    return _make("recency", ratio, options, scorer="recency", decay=0.0)


def vnorm(ratio: float | None = None, **options: Any) -> Policy:
    """InertiaKV's aggregation of attention times value norm (arXiv 2609.03515 section 5.1)."""
    return _make("vnorm", ratio, options, scorer="vnorm")


def entropy(ratio: float | None = None, **options: Any) -> Policy:
    """InertiaKV's aggregation of attention weighted by entropy (arXiv 2609.03515 section 5.1)."""
    return _make("entropy", ratio, options, scorer="entropy")


def learned(
    ratio: float | None = None, *, scorer_weights: str | None = None, **options: Any
) -> Policy:
    """InertiaKV's aggregation of the learned bilinear scorer (arXiv 2609.03515 section 5.1).

    Args:
      ratio: fraction of the prompt removed.
      scorer_weights: file written by ``inertiakv train-scorer``.
      **options: fields of ``Policy``.
    """
    if scorer_weights is None:
        raise ValueError(
            "policy 'learned' needs scorer_weights=, a file that `inertiakv train-scorer` wrote"
        )
    return _make("learned", ratio, options, scorer="learned", scorer_weights=scorer_weights)


def snapkv(ratio: float | None = None, **options: Any) -> Policy:
    """SnapKV: once, after prefill, what the prompt's last 64 queries attend to, pooled, per head.

    Source: arXiv 2404.14469. Deviations: scores of a kv head are the mean of its query heads; the
    pool is a mean of 5 neighbours, as in kvpress (the paper pools by maximum of 7).
    """
    return _prefill_time("snapkv", ratio, options, scorer=SNAPKV)


def adakv_ea(ratio: float | None = None, **options: Any) -> Policy:
    """Ada-KV budgets per head over Expected Attention, once, after prefill.

    Sources: arXiv 2407.11550, 2510.00636. The heads of a layer keep different numbers of tokens;
    memory is that of the longest head, the rest is masked.
    """
    return _prefill_time(
        "adakv-ea",
        ratio,
        options,
        scorer=EXPECTED_ATTENTION,
        head_budgets="layer",
        protect_first=4,
    )


def kvzip(ratio: float | None = None, **options: Any) -> Policy:
    """KVzip: once, after prefill, what repeating the prompt attends to; budgets over all heads.

    Source: arXiv 2505.23416. Reads the prompt a second time. Memory is that of the longest head,
    the rest is masked.
    """
    return _prefill_time(
        "kvzip", ratio, options, scorer=KVZIP, head_budgets="model", protect_first=4
    )


METHODS: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "full": _full,
        "inertiakv": inertiakv,
        "score-free": score_free,
        "single-step": single_step,
        "cumulative": cumulative,
        "tova": tova,
        "h2o": h2o,
        "snapkv": snapkv,
        "adakv-ea": adakv_ea,
        "keydiff": keydiff,
        "knorm": knorm,
        "kvzip": kvzip,
        "streaming-llm": streaming_llm,
        "random": random,
        "vnorm": vnorm,
        "entropy": entropy,
        "recency": recency,
        "learned": learned,
    }
)
"""Makers by name; lazyR has its interval in its name and is not among them."""


def _make(name: str, ratio: float | None, options: Mapping[str, Any], **method: Any) -> Policy:
    """A policy of ``method``'s fields, varied by ``options``."""
    options = dict(options)
    rule = options.pop("aggregation", None)
    if rule is not None and not (isinstance(rule, str) and rule in RULES):
        raise ValueError(f"aggregation must be one of {', '.join(RULES)}, got {rule!r}")
    options = {**method, **(RULES[rule] if rule is not None else {}), **options}
    _check_names(options, Policy, name)
    if ratio is None and options.get("tokens") is None and options.get("kv_bytes") is None:
        ratio = DEFAULT_RATIO
    return Policy(name, ratio=ratio, **options)


def _prefill_time(
    name: str, ratio: float | None, options: Mapping[str, Any], **method: Any
) -> Policy:
    options = {**method, **options}
    _check_names(options, PrefillMethod, name)
    if ratio is None and options.get("tokens") is None and options.get("kv_bytes") is None:
        ratio = DEFAULT_RATIO
    chosen = PrefillMethod(ratio=ratio, **options)
    return Policy(name, ratio=0.0, retention=chosen.retention, prefill=chosen)


def _check_names(options: Mapping[str, Any], of: type, name: str) -> None:
    known = [field.name for field in fields(of) if field.name not in ("name", "prefill")]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ValueError(
            f"policy {name!r} has no option {', '.join(map(repr, unknown))}; it takes "
            + ", ".join(known)
        )
