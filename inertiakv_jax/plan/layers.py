"""A model cut down to a few layers, and numbers of it carried over to all of them.

Layers of one kind compile to the same code, so what a program holds grows in a straight line with
their number. Compiling one layer of each kind, and then one more of each, gives that line.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from inertiakv_jax.config import ModelConfig

Kind = tuple[bool, bool]
"""Whether a layer has a sliding window, and whether it has experts."""


def layer_kinds(config: ModelConfig) -> Counter[Kind]:
    """How many layers there are of each kind, in order of appearance."""
    windows = config.sliding_windows
    return Counter(
        (windows[layer] is not None, config.has_experts(layer))
        for layer in range(config.num_layers)
    )


def samples(config: ModelConfig, *, whole: bool = False) -> list[ModelConfig]:
    """One layer of each kind; then, for each kind with more layers, the same and one more.

    With ``whole`` all layers, from which nothing has to be carried over.
    """
    if whole:
        return [config]
    kinds = layer_kinds(config)
    base = dict.fromkeys(kinds, 1)
    more = [base | {kind: 2} for kind, count in kinds.items() if count > 1]
    return [_with_layers(config, counts) for counts in (base, *more)]


def extrapolate(config: ModelConfig, values: Sequence[float]) -> float:
    """A number of all layers, from those of ``samples``, in their order."""
    base, *more = values
    counts = [count for count in layer_kinds(config).values() if count > 1]
    return base + sum(
        (count - 1) * (value - base) for count, value in zip(counts, more, strict=True)
    )


def _with_layers(config: ModelConfig, counts: dict[Kind, int]) -> ModelConfig:
    layers = [kind for kind, count in counts.items() for _ in range(count)]
    experts = config.experts
    if experts is not None:
        dense = tuple(i for i, (_, has_experts) in enumerate(layers) if not has_experts)
        experts = dataclasses.replace(experts, dense_layers=dense)
    return dataclasses.replace(
        config,
        num_layers=len(layers),
        local_layers=tuple(i for i, (windowed, _) in enumerate(layers) if windowed),
        experts=experts,
    )
