"""What a run evaluates: from a YAML file and flags, checked before anything is loaded."""

import dataclasses
import importlib.resources
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from inertiakv_jax import policies
from inertiakv_jax.checks import check_field, is_a, is_count
from inertiakv_jax.eval.tasks.catalogue import tasks_named
from inertiakv_jax.files import parse_yaml
from inertiakv_jax.policies import Policy
from inertiakv_jax.prompt_thinning import observing_of

_OPTIONAL = ("revision", "data_dir", "samples", "max_prompt_tokens")
_LISTS: Mapping[str, tuple[type, ...]] = {
    "tasks": (str,),
    "policies": (str, Mapping),
    "ratios": (Real,),
    "lengths": (Real,),
    "depths": (Real,),
    "paper": (Mapping,),
}
_SAID = {str: "a text", Mapping: "a mapping", Real: "a number"}

_NOT_IDENTITY = ("name", "data_dir", "paper")
"""Fields that do not change what is measured: the examples' checksums say what the data was."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A policy with its budget and options, as one line of the results.

    Attributes:
      policy: its name.
      options: all else that makes it, the budget included.
    """

    policy: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Unique within a run, like "lazy4 ratio=0.9"."""
        options = (f"{name}={value}" for name, value in sorted(self.options.items()))
        return " ".join((self.policy, *options))

    def make(self) -> Policy:
        """The policy itself.

        Raises:
          ValueError: an unknown name or option, or a value out of range.
        """
        try:
            return policies.by_name(self.policy, **self.options)
        except TypeError as error:
            raise ValueError(f"policy {self.label!r}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Settings:
    """Fields of a configuration file. Sequences may be lists, as YAML has them.

    Attributes:
      model: catalogue name, hub id, folder or .gguf file.
      tasks: names or groups; see ``tasks.catalogue``.
      policies: names, or mappings with "name" and options of the policy.
      ratios: fractions of the prompt removed, for policies that do not say their budget.
      name: title of the report.
      dtype: "float32" or "bfloat16".
      revision: of a hub id.
      lengths: of generated examples, in tokens, prompt and answer.
      samples: examples of each task and length; None takes all (500 of RULER).
      seed: of generated examples.
      haystack: of the needle grid, "essay" or "noise".
      depths: of the needle grid, in percent.
      batch: rows decoded together.
      max_prompt_tokens: where prompts of LongBench are cut; None is what the model has room for.
      chat: False leaves the model's chat template out.
      data_dir: folder of benchmark data; None is the hub.
      paper: published numbers to show beside, mappings with policy, ratio, benchmark, score and
        optionally model.

    Raises:
      ValueError: a value out of range, or of another type.
    """

    model: str
    tasks: tuple[str, ...]
    policies: tuple[str | Mapping[str, Any], ...] = ("full", "inertiakv")
    ratios: tuple[float, ...] = (0.9,)
    name: str = "evaluation"
    dtype: str = "float32"
    revision: str | None = None
    lengths: tuple[int, ...] = (4096,)
    samples: int | None = None
    seed: int = 42
    haystack: str = "essay"
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    batch: int = 1
    max_prompt_tokens: int | None = None
    chat: bool = True
    data_dir: str | None = None
    paper: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        for name, kinds in _LISTS.items():
            items = getattr(self, name)
            if not isinstance(items, tuple) or any(not is_a(item, *kinds) for item in items):
                what = " or ".join(_SAID[kind] for kind in kinds)
                raise ValueError(f"{name} must be a list, each of it {what}, got {items!r}")
            if not items and name != "paper":
                raise ValueError(f"{name} must not be empty")
        for name in ("model", "name", "dtype", "haystack", "revision", "data_dir"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name not in _OPTIONAL):
                raise ValueError(f"{name} must be a text, got {value!r}")
        for name in ("batch", "samples", "max_prompt_tokens"):
            _check_positive(name, getattr(self, name), optional=name in _OPTIONAL)
        for length in self.lengths:
            _check_positive("each of lengths", length)
        check_field(self, "seed", lambda x: is_count(x) and x < 2**32, "an integer below 2**32")
        if not isinstance(self.chat, bool):
            raise ValueError(f"chat must be true or false, got {self.chat!r}")
        for entry in self.paper:
            _check_published(entry)
        tasks_named(self.tasks)
        self.variants()

    def variants(self) -> list[Variant]:
        """Each policy with each budget, in the order that ``continuation.answers`` likes best.

        Those that read a prompt alike come together, and the full cache last.
        """
        found: dict[str, Variant] = {}
        for entry in self.policies:
            options = {"name": entry} if isinstance(entry, str) else dict(entry)
            name = options.pop("name", None)
            if not isinstance(name, str) or not all(isinstance(key, str) for key in options):
                raise ValueError(f"a policy must be a name, or have one, got {entry!r}")
            budgets: list[dict[str, Any]] = [{"ratio": float(ratio)} for ratio in self.ratios]
            own = {"ratio", "tokens", "kv_bytes"} & set(options)
            if name == "full" or own or policies.has_budget(name):
                budgets = [{}]
            for budget in budgets:
                variant = Variant(name, options | budget)
                found[variant.label] = variant
        made = {label: variant.make() for label, variant in found.items()}

        def place(label: str) -> tuple[bool, str, bool]:
            observing = observing_of(made[label])
            return observing is None, repr(observing), not made[label].evicts

        return [found[label] for label in sorted(made, key=place)]

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed, as JSON has it."""
        fields = dataclasses.asdict(self)
        return {name: _plain(fields[name]) for name in fields if name not in _NOT_IDENTITY}


def read_config(name: str) -> dict[str, Any]:
    """Fields of a configuration: a YAML file, or the name of one that comes along.

    Raises:
      ValueError: there is none, or it is no mapping.
    """
    path = Path(name)
    if not path.is_file():
        shipped = importlib.resources.files("inertiakv_jax.configs").joinpath(f"{name}.yaml")
        if not shipped.is_file():
            raise ValueError(
                f"--config {name!r} is no file, and none of: {', '.join(shipped_names())}"
            )
        text = shipped.read_text("utf-8")
    else:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not valid UTF-8: {error}") from error
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold fields and values, got {content!r:.60}")
    known = {field.name for field in dataclasses.fields(Settings)}
    unknown = sorted(map(str, content.keys() - known))
    if unknown:
        raise ValueError(
            f"{name}: unknown {', '.join(unknown)}; expected {', '.join(sorted(known))}"
        )
    return content


def shipped_names() -> list[str]:
    """Names of the configurations that come along, like "eval/ruler"."""
    root = importlib.resources.files("inertiakv_jax.configs")
    return sorted(
        f"{folder}/{file.name.removesuffix('.yaml')}"
        for folder in ("eval", "paper")
        for file in root.joinpath(folder).iterdir()
        if file.name.endswith(".yaml")
    )


def _check_positive(name: str, value: Any, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _check_published(entry: Mapping[str, Any]) -> None:
    """Raise ValueError unless an entry of ``paper`` has what a report shows."""
    wanted = {"policy": str, "benchmark": str, "score": Real}
    optional = {"ratio": (0.0, Real), "model": ("", str), "options": ({}, Mapping)}
    good = all(is_a(entry.get(key), kind) for key, kind in wanted.items()) and all(
        is_a(entry.get(key, default), kind) for key, (default, kind) in optional.items()
    )
    if not good:
        raise ValueError(
            "each of paper must have policy, benchmark and score, and may have ratio, model and "
            f"options, got {dict(entry)!r}"
        )


def _plain(value: Any) -> Any:
    """Tuples to lists, as after a round trip through JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
