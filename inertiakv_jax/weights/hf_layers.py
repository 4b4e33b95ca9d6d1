"""Which layers of a model have a sliding window, as config.json says it."""

from __future__ import annotations

from dataclasses import dataclass

from inertiakv_jax.config import MAX_LAYERS
from inertiakv_jax.weights.hf_rope import GLOBAL, LOCAL
from inertiakv_jax.weights.json_fields import Fields, boolean, integer, strings


@dataclass(frozen=True)
class Layers:
    """How a family places sliding windows.

    Attributes:
        rule: "none"; "all" layers; the "upper" ones, from ``max_window_layers`` on; "pattern":
            all but every ``pattern``-th.
        window: default of ``sliding_window``.
        pattern: default of ``sliding_window_pattern``.
        switch: field that must be true for there to be windows; "" is always.
        listed: ``layer_types`` may name each layer's kind, and then decides.
    """

    rule: str = "none"
    window: int | None = None
    pattern: int = 0
    switch: str = ""
    listed: bool = False


NO_WINDOWS = Layers()


def local_layers(
    config: Fields, layers: Layers, num_layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """The window in tokens and the layers that have it; ``(None, ())`` if there is none.

    Raises:
        ValueError: a window in a family that has none, or fields that contradict each other.
    """
    if num_layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {MAX_LAYERS}, got {num_layers}")
    window = _window(config, layers)
    local = _by_rule(config, layers, num_layers) if window is not None else ()
    kinds = strings(config, "layer_types")
    if kinds:
        if set(kinds) - {GLOBAL, LOCAL} or len(kinds) != num_layers:
            raise ValueError(
                f"layer_types must name {GLOBAL!r} or {LOCAL!r} for each of {num_layers} layers, "
                f"got {len(kinds)}: {sorted(set(kinds))}"
            )
        listed = tuple(i for i, kind in enumerate(kinds) if kind == LOCAL)
        if listed and window is None:
            raise ValueError(f"layer_types with {LOCAL!r} needs a sliding_window, got none")
        if listed != local and not layers.listed:
            raise ValueError("layer_types is not supported in this family")
        local = listed
    return (window, local) if local else (None, ())


def _by_rule(config: Fields, layers: Layers, num_layers: int) -> tuple[int, ...]:
    if layers.rule == "all":
        return tuple(range(num_layers))
    if layers.rule == "upper":
        return tuple(range(min(integer(config, "max_window_layers", 28), num_layers), num_layers))
    pattern = integer(config, "sliding_window_pattern", layers.pattern)
    return tuple(i for i in range(num_layers) if (i + 1) % pattern)


def _window(config: Fields, layers: Layers) -> int | None:
    if layers.switch and not boolean(config, layers.switch):
        config.get("sliding_window")  # switched off: Qwen's configs name one all the same
        return None
    window = config.get("sliding_window", layers.window)
    if window is None and layers.rule != "pattern":
        return None
    if layers.rule == "none":
        raise ValueError(f"sliding_window {window!r} is not supported in this family")
    return integer({"sliding_window": window}, "sliding_window")
