"""The methods by name: each a point in the space of ``Policy``.

Every maker takes the fraction of the prompt to remove (``ratio``; or ``tokens`` or ``kv_bytes``;
0.9 if nothing is given), and any other field of ``Policy`` to vary the method.

Deviations common to all from other libraries: keys keep the rotation of their place in the text; no
token is protected unless a field says so, and then by a mask, not a score; ties go by position; the
token of a step is inserted before it is scored, and may go in its own step.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from inertiakv_jax.aggregation import RULES
from inertiakv_jax.budget import kv_bytes_per_token as kv_bytes_per_token
from inertiakv_jax.budget import tokens_kept as tokens_kept
from inertiakv_jax.checks import is_integer
from inertiakv_jax.policy import EVERY_STEP, STEP_ONE_ONLY, Policy
from inertiakv_jax.policy import check_policy as check_policy
from inertiakv_jax.prefill_method import EXPECTED_ATTENTION, KVZIP, SNAPKV, PrefillMethod
from inertiakv_jax.state import NO_EVICTION, PER_HEAD, PER_LAYER

DEFAULT_RATIO = 0.9
_FILES = (".yaml", ".yml")
_BUDGETS = ("ratio", "tokens", "kv_bytes")


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
    return _make(names.get(refresh, f"lazy{refresh}"), ratio, options)


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


_MAKERS: dict[str, Callable[..., Policy]] = {
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
METHODS: Mapping[str, Callable[..., Policy]] = MappingProxyType(_MAKERS)
"""Makers by name; lazyR has its interval in its name and is not among them."""

NAMES = (*_MAKERS, "lazyR")
"""What ``by_name`` takes; R is the refresh interval, as in lazy4."""


def by_name(name: str, ratio: float | None = None, **options: Any) -> Policy:
    """Make a policy from its name, as given on the command line.

    Args:
      name: one of ``NAMES``, with options behind commas if wanted ("tova,protect_recent=1"); "A+B"
        for the prefill-time method A followed by the decode-time method B, with ``prefill_ratio``
        (0.5) for A and the rest for B; or the path of a .yaml file.
      ratio: fraction of the prompt removed; ignored by ``full``.
      **options: fields of ``Policy``; likewise. Those of ``PrefillMethod`` for a prefill-time
        method; ``aggregation``, one of ``aggregation.RULES``, for a decode-time one.

    Raises:
      ValueError: an unknown name (the known ones are listed), or an option out of range.

    >>> by_name("lazy4", ratio=0.9).refresh
    4
    >>> by_name("snapkv+lazy4", ratio=0.9).prefill.scorer
    'snapkv'
    >>> by_name("inertiakv,decay=0.5,layer_weights=uniform").decay
    0.5
    """
    if not isinstance(name, str):
        raise ValueError(f"policy must be a name, got {name!r}; one of: {', '.join(NAMES)}")
    if "," in name:
        name, written = _split_options(name)
        options = {**written, **options}
        ratio = options.pop("ratio", None) if ratio is None else ratio
    if name.endswith(_FILES):
        return from_file(name, ratio=ratio, **options)
    if "+" in name:
        first, second = name.split("+", 1)
        prefill_ratio = options.pop("prefill_ratio", 0.5)
        return compose(by_name(first, prefill_ratio), by_name(second, ratio, **options))
    if match := re.fullmatch(r"lazy([1-9][0-9]*)", name):
        return lazy(int(match[1]), ratio, **options)
    if name not in _MAKERS:
        raise ValueError(f"unknown policy {name!r}; expected one of: {', '.join(NAMES)}")
    return _MAKERS[name](ratio, **options)


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Take "NAME,OPTION=VALUE,..." apart; values are YAML."""
    name, *pairs = text.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key in ("", "name") or key in options:
            raise ValueError(f"policy {text!r}: expected OPTION=VALUE once each, got {pair!r}")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"policy {text!r}: {value!r} is no YAML value") from error
    return name, options


def compose(prefill: Policy, decode: Policy) -> Policy:
    """A prefill-time method, then a decode-time one: for where prefill memory binds.

    The first is taken with the retention of the second: a shared ranking needs the same tokens in
    all layers, so the scores are averaged over layers and heads (ours).

    Source: arXiv 2609.03515, limitations.

    Raises:
      ValueError: ``prefill`` has no prefill-time method, or ``decode`` has one, too.
    """
    method = prefill.prefill
    if method is None:
        raise ValueError(f"{prefill.name!r} is no prefill-time method")
    if decode.prefill is not None:
        raise ValueError(f"{decode.name!r} is a prefill-time method, too")
    head_budgets = method.head_budgets if decode.retention == PER_HEAD else "equal"
    method = replace(method, retention=decode.retention, head_budgets=head_budgets)
    return replace(decode, name=f"{prefill.name}+{decode.name}", prefill=method)


def from_file(path: str | Path, **options: Any) -> Policy:
    """Make a policy from a .yaml file: ``name`` and options, as ``by_name`` takes them.

    Args:
      path: the file.
      **options: take precedence over the file's; None leaves the file's.

    Raises:
      ValueError: no such file, no mapping, or an unknown key or value; names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no policy at {str(path)!r}: {error}") from error
    try:
        config = yaml.safe_load(text)
        if not isinstance(config, dict) or not isinstance(config.get("name"), str):
            raise ValueError("expected a mapping with a name and options")
        if config["name"].endswith(_FILES):
            raise ValueError(f"the name must be a method's, got {config['name']!r}")
        given = {key: value for key, value in options.items() if value is not None}
        if any(key in _BUDGETS for key in given):
            config = {key: value for key, value in config.items() if key not in _BUDGETS}
        return by_name(**(config | given))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def _make(name: str, ratio: float | None, options: Mapping[str, Any], **method: Any) -> Policy:
    """A policy of ``method``'s fields, varied by ``options``."""
    options = dict(options)
    rule = options.pop("aggregation", None)
    if rule is not None and rule not in RULES:
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
