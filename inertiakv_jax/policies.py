"""Policies by name: the methods, their options, compositions of two, and files."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from inertiakv_jax.budget import kv_bytes_per_token as kv_bytes_per_token
from inertiakv_jax.budget import tokens_kept as tokens_kept
from inertiakv_jax.files import parse_yaml
from inertiakv_jax.methods import METHODS as METHODS
from inertiakv_jax.methods import adakv_ea as adakv_ea
from inertiakv_jax.methods import cumulative as cumulative
from inertiakv_jax.methods import entropy as entropy
from inertiakv_jax.methods import full as full
from inertiakv_jax.methods import h2o as h2o
from inertiakv_jax.methods import inertiakv as inertiakv
from inertiakv_jax.methods import keydiff as keydiff
from inertiakv_jax.methods import knorm as knorm
from inertiakv_jax.methods import kvzip as kvzip
from inertiakv_jax.methods import lazy as lazy
from inertiakv_jax.methods import learned as learned
from inertiakv_jax.methods import random as random
from inertiakv_jax.methods import recency as recency
from inertiakv_jax.methods import score_free as score_free
from inertiakv_jax.methods import single_step as single_step
from inertiakv_jax.methods import snapkv as snapkv
from inertiakv_jax.methods import streaming_llm as streaming_llm
from inertiakv_jax.methods import tova as tova
from inertiakv_jax.methods import vnorm as vnorm
from inertiakv_jax.policy import Policy as Policy
from inertiakv_jax.policy import check_policy as check_policy
from inertiakv_jax.state import PER_HEAD

_FILES = (".yaml", ".yml")
_BUDGETS = ("ratio", "tokens", "kv_bytes")

NAMES = (*METHODS, "lazyR")
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
        if "refresh" in options:
            raise ValueError(f"policy {name!r} has its refresh in its name, got another one")
        return lazy(int(match[1]), ratio, **options)
    if name not in METHODS:
        raise ValueError(f"unknown policy {name!r}; expected one of: {', '.join(NAMES)}")
    return METHODS[name](ratio, **options)


def as_written(text: str, ratio: float | None = None) -> Policy:
    """``by_name``, but named as it is written, options and all, which tell two of one method apart.

    Args:
      text: as on the command line.
      ratio: fraction of the prompt removed, where ``text`` itself gives no budget.

    >>> as_written("inertiakv,scorer=keydiff,ratio=0.5", ratio=0.9).ratio
    0.5
    """
    return replace(by_name(text, None if has_budget(text) else ratio), name=text)


def has_budget(text: str) -> bool:
    """Whether a policy as it is written, or the file that it names, sets the budget.

    Raises:
      ValueError: there is no such file, or it is none of a policy.
    """
    name, *options = text.split(",")
    if any(option.partition("=")[0] in _BUDGETS for option in options):
        return True
    return name.endswith(_FILES) and any(key in _BUDGETS for key in _read_file(name))


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Take "NAME,OPTION=VALUE,..." apart; values are YAML."""
    name, *pairs = text.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key in ("", "name") or key in options:
            raise ValueError(f"policy {text!r}: expected OPTION=VALUE once each, got {pair!r}")
        try:
            options[key] = parse_yaml(value)
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
    config = _read_file(path)
    given = {key: value for key, value in options.items() if value is not None}
    if any(key in _BUDGETS for key in given):
        config = {key: value for key, value in config.items() if key not in _BUDGETS}
    try:
        return by_name(**(config | given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read_file(path: str | Path) -> dict[str, Any]:
    """The name and options in a .yaml file, not looked at yet; see ``from_file``."""
    try:
        config = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no policy at {str(path)!r}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("name"), str):
        raise ValueError(f"{path}: expected a mapping with a name and options")
    if config["name"].endswith(_FILES):
        raise ValueError(f"{path}: the name must be a method's, got {config['name']!r}")
    return config
