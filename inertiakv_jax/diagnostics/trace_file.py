"""Traces as JSON files, which are not trusted when read."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inertiakv_jax.diagnostics.records import Boundary, Trace, TracedRun
from inertiakv_jax.state import RETENTIONS

FORMAT, VERSION = "inertiakv-trace", 1
MAX_BYTES = 2**28
"""Largest file that is read. One ranking a head takes six letters a token: 40 million of them."""

MAX_ID = 2**31 - 1


def to_json(trace: Trace) -> str:
    """The trace as JSON text, in the schema of ``docs/diagnostics.md``."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": dict(trace.config),
        "prompt": list(trace.prompt),
        "continuation": list(trace.continuation),
        "full_chosen": trace.full_chosen.tolist(),
        "runs": [_run_to_json(run) for run in trace.runs],
        "kept_jaccard": [
            {"runs": list(pair), "per_layer": _numbers(values)}
            for pair, values in trace.kept_jaccard.items()
        ],
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def _run_to_json(run: TracedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "policy": dict(run.policy),
        "retention": run.retention,
        "evicts": run.evicts,
        "prompt_slots": run.prompt_slots,
        "slots": run.slots,
        "evicted_at": run.evicted_at.tolist(),
        "chosen": run.chosen.tolist(),
        "chosen_logit": run.chosen_logit.tolist(),
        "measures": {name: _numbers(values) for name, values in run.measures.items()},
        "boundary": run.boundary
        and {
            "positions": run.boundary.positions.tolist(),
            "utilities": _numbers(run.boundary.utilities),
            "threshold": _numbers(run.boundary.threshold),
        },
    }


def _numbers(values: np.ndarray) -> Any:
    """Nested lists of six significant digits; null for NaN."""
    if values.ndim:
        return [_numbers(value) for value in values]
    number = float(values)
    return None if math.isnan(number) else float(f"{number:.6g}")


def read_trace(path: str | os.PathLike) -> Trace:
    """Read a trace file. It is not trusted: every field is checked.

    Raises:
      ValueError: there is no such file, it is none of ``to_json``'s, or a field is not what it
        must be; names the file and the field.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"a trace has at most {MAX_BYTES:,} bytes, this file has {size:,}")
        content = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        return _trace(content)
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from error
    except (ValueError, OverflowError, RecursionError) as error:  # of JSON and UTF-8, too
        raise ValueError(f"{path} is no trace: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _trace(content: Any) -> Trace:
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f'expected an object with "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, got {content.get('version')!r:.40}")
    prompt = _integers(content, "prompt", (None,), 0, MAX_ID)
    continuation = _integers(content, "continuation", (None,), 0, MAX_ID)
    steps, length = len(continuation), len(prompt) + len(continuation)
    runs = tuple(_run(run, steps, length) for run in _list_of(content, "runs", Mapping, "objects"))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"runs must have distinct names, got {names!r:.200}")
    return Trace(
        config=_field(content, "config", Mapping, "an object"),
        prompt=tuple(prompt.tolist()),
        continuation=tuple(continuation.tolist()),
        full_chosen=_integers(content, "full_chosen", (steps,), 0, MAX_ID),
        runs=runs,
        kept_jaccard=dict(
            _pair(pair, names, steps)
            for pair in _list_of(content, "kept_jaccard", Mapping, "objects")
        ),
    )


def _run(content: Mapping[str, Any], steps: int, length: int) -> TracedRun:
    retention = _field(content, "retention", str, "a string")
    if retention not in RETENTIONS:
        raise ValueError(f"retention must be one of {', '.join(RETENTIONS)}, got {retention!r:.40}")
    measures = _field(content, "measures", Mapping, "an object")
    run = TracedRun(
        name=_field(content, "name", str, "a string"),
        policy=_field(content, "policy", Mapping, "an object"),
        retention=retention,
        evicts=_field(content, "evicts", bool, "true or false"),
        prompt_slots=_count(content, "prompt_slots"),
        slots=_count(content, "slots"),
        evicted_at=_integers(content, "evicted_at", (None, None, length), 0, steps + 1),
        chosen=_integers(content, "chosen", (steps,), 0, MAX_ID),
        chosen_logit=_array(content, "chosen_logit", (steps,)).astype(np.float32),
        measures={str(name): _array(measures, name, (steps, None)) for name in measures},
        boundary=_boundary(content.get("boundary"), steps, length),
    )
    _check_evictions(run, steps)
    return run


def _check_evictions(run: TracedRun, steps: int) -> None:
    """Raise ValueError for evictions that no cache of that many slots can have had."""
    for step in range(1, steps + 1):
        slots = run.prompt_slots if step == 1 else run.slots
        held = int(run.kept(step - 1).sum(axis=-1).max()) + 1
        if held > slots:
            raise ValueError(f"evicted_at leaves {held} tokens in {slots} slots at step {step}")
    at = run.evicted_at
    if not run.evicts and (run.slots != run.prompt_slots or ((at > 0) & (at <= steps)).any()):
        raise ValueError("evicted_at and slots must not change in a run that evicts nothing")
    new = at[..., at.shape[-1] - steps :]
    if (new < np.arange(1, steps + 1)).any():
        raise ValueError("evicted_at has a token evicted before its own step")
    if int(run.kept(steps).sum(axis=-1).max()) > run.slots:
        raise ValueError(f"evicted_at leaves more tokens at the end than {run.slots} slots hold")


def _boundary(content: Any, steps: int, length: int) -> Boundary | None:
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise ValueError(f"boundary must be an object or null, got {content!r:.40}")
    positions = _integers(content, "positions", (None,), 0, length - 1)
    return Boundary(
        positions=positions,
        utilities=_array(content, "utilities", (len(positions), steps)),
        threshold=_array(content, "threshold", (steps,)),
    )


def _pair(content: Mapping[str, Any], names: Sequence[str], steps: int):
    pair = tuple(_list_of(content, "runs", str, "strings"))
    if len(pair) != 2 or not set(pair) <= set(names):
        raise ValueError(f"kept_jaccard must be of two of the runs, got {pair!r:.200}")
    return pair, _array(content, "per_layer", (steps, None))


def _field(content: Mapping[str, Any], key: str, kind: type, expected: str) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be {expected}, got {value!r:.40}")
    return value


def _list_of(content: Mapping[str, Any], key: str, kind: type, what: str) -> list[Any]:
    value = content.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{key} must be a list of {what}, got {value!r:.40}")
    return value


def _count(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or not 1 <= value <= MAX_ID:
        raise ValueError(f"{key} must be an integer from 1 on, got {value!r:.40}")
    return value


def _integers(content, key: str, shape: tuple[int | None, ...], low: int, high: int) -> np.ndarray:
    values = _nested(content, key, shape, "integers")
    if values.dtype != np.int64 or values.min() < low or values.max() > high:
        raise ValueError(f"{key} must be integers in {low} .. {high}, got {content[key]!r:.40}")
    return values.astype(np.int32)


def _array(content: Mapping[str, Any], key: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """Numbers, with NaN for null."""
    values = _nested(content, key, shape, "numbers")
    if values.dtype == np.object_:  # there is a null
        known = [value for value in values.flat if value is not None]
        if not all(type(value) in (int, float) for value in known):
            raise ValueError(f"{key} must be numbers or null, got {content[key]!r:.40}")
    elif values.dtype not in (np.int64, np.float64):
        raise ValueError(f"{key} must be numbers or null, got {content[key]!r:.40}")
    return values.astype(np.float64)


def _nested(content, key: str, shape: tuple[int | None, ...], what: str) -> np.ndarray:
    """Nested lists as an array of ``shape``, in which None is any length from 1 on."""
    try:
        values = np.array(content.get(key))
    except (ValueError, OverflowError):  # ragged
        values = np.array(None)
    fits = values.ndim == len(shape) and values.size
    if not fits or any(n not in (None, m) for n, m in zip(shape, values.shape, strict=True)):
        sizes = " x ".join("n" if size is None else str(size) for size in shape)
        raise ValueError(f"{key} must be lists of {sizes} {what}, got {content.get(key)!r:.40}")
    return values
