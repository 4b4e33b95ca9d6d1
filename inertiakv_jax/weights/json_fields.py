"""Fields of a parsed JSON object, each of the type asked for or a ValueError that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


def integer(fields: Fields, key: str, default: int | None = None, *, within: str = "") -> int:
    """An integer of at least 1; ``default`` where the field is missing or null.

    Args:
        fields: the object.
        key: the field.
        default: None makes the field required.
        within: what the object is called in messages, with a dot behind it; here and below.
    """
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{within}{key} must be an integer of at least 1, got {value!r:.80}")
    return value


def number(fields: Fields, key: str, default: float | None = None, *, within: str = "") -> float:
    """A number as a float; ``default`` where the field is missing or null."""
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{within}{key} must be a number, got {value!r:.80}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{within}{key} must be a number below 1e308, got more") from error


def optional_number(fields: Fields, key: str, default: float | None = None) -> float | None:
    """A number; null is None, a missing field ``default``."""
    if fields.get(key, default) is None:
        return None
    return number(fields, key, default)


def whole_number(fields: Fields, key: str, *, within: str = "") -> int:
    """An integer that may be written as a float."""
    value = number(fields, key, within=within)
    if not value.is_integer():
        raise ValueError(f"{within}{key} must be a whole number, got {value!r}")
    return int(value)


def boolean(fields: Fields, key: str, default: bool = False, *, within: str = "") -> bool:
    """True or false; ``default`` where the field is missing or null."""
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{within}{key} must be true or false, got {value!r:.80}")
    return value


def strings(fields: Fields, key: str) -> list[str]:
    """A list of strings; empty where the field is missing or null."""
    return _list(fields, key, str, "strings")


def integers(fields: Fields, key: str) -> list[int]:
    """A list of integers; empty where the field is missing or null."""
    return _list(fields, key, int, "integers")


def _list(fields: Fields, key: str, kind: type, what: str) -> list[Any]:
    value = fields.get(key)
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    ):
        raise ValueError(f"{key} must be a list of {what}, got {value!r:.80}")
    return list(value)


def mapping(fields: Fields, key: str, *, within: str = "") -> Fields:
    """An object; empty where the field is missing, null or empty."""
    value = fields.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{within}{key} must be an object, got {value!r:.80}")
    return value


def token_ids(fields: Fields, key: str, default: int | None = None) -> tuple[int, ...]:
    """One token id, a list of them or none; ``default`` where the field is missing."""
    value = fields.get(key, default)
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{key} must be an integer, a list of integers or null, got {value!r:.80}")
    return tuple(ids)
