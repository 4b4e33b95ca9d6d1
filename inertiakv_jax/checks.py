"""Checks of values that users give, with errors that say what was expected and what came."""

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np


def is_a(value: Any, *kinds: type) -> bool:
    """``isinstance``, but True and False are no numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """An int or NumPy integer, but no bool."""
    return is_a(value, int, np.integer)


def is_count(value: Any) -> bool:
    """An integer from 0 on."""
    return is_integer(value) and value >= 0


def is_int32_count(value: Any) -> bool:
    """An integer in 0 .. 2**31 - 1."""
    return is_count(value) and value < 2**31


def is_positive_count(value: Any) -> bool:
    """An integer from 1 on."""
    return is_integer(value) and value >= 1


def in_unit_interval(value: Any) -> bool:
    """A real number in [0, 1), but no bool."""
    return is_a(value, numbers.Real) and 0.0 <= float(value) < 1.0


def check_field(owner: Any, name: str, good: Callable[[Any], bool], expected: str) -> None:
    """Raise ValueError unless ``good`` holds of the attribute ``name``."""
    value = getattr(owner, name)
    if not good(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_choice(owner: Any, name: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the attribute ``name`` is one of ``choices``."""
    value = getattr(owner, name)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
