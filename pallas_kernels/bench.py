"""Kernels, timed: with scoring, without it, the plain version of XLA, and a copy, in turns.

A call on the host returns before the device has computed anything, and costs as much as a short
kernel. So many calls run in one program, as they do in decoding: a loop whose every call needs a
result of the last one, over several sets of operands, one after the other, as layers do.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels.dispatch import check_implementation

XLA = "xla"

COLD_BYTES = 128 * 2**20
"""Operands that are more than this do not stay in a device's cache from turn to turn."""

_MOST_SETS, _MOST_CALLS = 16, 1000
_COPIED_BYTES = 512 * 2**20
_ROUND_S = 0.02  # of a program, were it as fast as a copy
_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @\"?([\w$.]+)")


class Case(Protocol):
    """One kernel at one shape."""

    @property
    def kernel(self) -> str:
        """Its name."""
        ...

    @property
    def dtype(self) -> str:
        """Of what it reads most."""
        ...

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names that ``call`` takes beside None."""
        ...

    @property
    def scorings(self) -> tuple[bool, ...]:
        """(True,), or (True, False) where a step that does not score makes another call."""
        ...

    @property
    def has_kernel(self) -> bool:
        """False: None, too, is left to XLA, but is not the plain version."""
        ...

    @property
    def name(self) -> str:
        """Of the shape."""
        ...

    @property
    def batch(self) -> int:
        """B."""
        ...

    @property
    def slots(self) -> int:
        """S."""
        ...

    @property
    def read_bytes(self) -> int:
        """Of the large operands of one call."""
        ...

    @property
    def working_bytes(self) -> int:
        """What one call may need beside its operands."""
        ...

    def bytes_moved(self, scored: bool) -> int:
        """What a single pass cannot do without: each operand and each result once.

        What an implementation writes for itself is not in it, and so lowers its bandwidth.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """What else there is to say of the shape, ready for JSON."""
        ...

    def link(self) -> Array:
        """What the first call takes in place of a result of the one before."""
        ...

    def inputs(self, number: int) -> tuple[Any, Any]:
        """The ``number``-th set of operands: those that are updated, and the others."""
        ...

    def call(self, implementation: str | None, scored: bool) -> Callable:
        """A function of link, updated and other operands, to link, updated ones and results."""
        ...


def num_sets(case: Case) -> int:
    """Sets of operands that the calls go through: over ``COLD_BYTES`` together, or 16."""
    return min(COLD_BYTES // case.read_bytes + 1, _MOST_SETS)


def is_cold(case: Case) -> bool:
    """Whether the operands come from memory, and not from a cache of the device."""
    return num_sets(case) * case.read_bytes > COLD_BYTES


def memory_bytes(case: Case) -> int:
    """What the measurement needs, about: all sets, what one call needs, and the copy."""
    return num_sets(case) * case.read_bytes + case.working_bytes + 2 * _COPIED_BYTES


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of one case, one number a round.

    Attributes:
      runs_as: the custom call that ``implementation`` became, or "xla" where it became none.
      calls: calls in each round's program.
      seconds: of one call that scores (True), and of one that does not (False).
      xla_seconds: likewise, of what XLA makes of the plain version; empty if that is what ran.
      copy_bytes_per_second: bytes read and written by a plain copy of a large array.
    """

    runs_as: str
    calls: int
    seconds: dict[bool, list[float]]
    xla_seconds: dict[bool, list[float]]
    copy_bytes_per_second: list[float]


def measure(case: Case, *, implementation: str | None, repeats: int) -> Measured:
    """Time one case on the default device.

    All contestants take turns, so that a device that slows down slows all of them; one round to
    warm up does not count. Each call depends on the one before it, and the device is waited for.

    Args:
      case: the kernel and its shape.
      implementation: one of ``case.implementations``; None is the best for the device.
      repeats: rounds that count, at least 1.

    Raises:
      ValueError: ``implementation`` is unknown, cannot run here or refuses the shape, or
        ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    check_implementation(implementation, case.implementations, platform=jax.devices()[0].platform)
    copy = _Copy()
    calls = _calls(case, copy.bytes_per_second())
    link, inputs = case.link(), [case.inputs(i) for i in range(num_sets(case))]
    operands = (link, [state for state, _ in inputs], [fixed for _, fixed in inputs])
    turns = calls // num_sets(case)
    compiled = {
        scored: _compile(case.call(implementation, scored), operands, turns)
        for scored in case.scorings
    }
    runs_as = compiled[True][1]
    programs = {(scored, False): program for scored, (program, _) in compiled.items()}
    if implementation != XLA and (runs_as != XLA or not case.has_kernel):
        for scored in case.scorings:
            programs[scored, True] = _compile(case.call(XLA, scored), operands, turns)[0]
    seconds, copied = _take_turns(programs, operands, copy, repeats)
    times = {key: [elapsed / calls for elapsed in values] for key, values in seconds.items()}
    return Measured(
        runs_as=runs_as,
        calls=calls,
        seconds={scored: times[scored, False] for scored in case.scorings},
        xla_seconds={scored: t for (scored, plain), t in times.items() if plain},
        copy_bytes_per_second=copied,
    )


def _take_turns(programs, operands, copy, repeats) -> tuple[dict[Any, list[float]], list[float]]:
    """Seconds of each program, and the copy's bytes a second, of each round but the first."""
    seconds = {key: [] for key in programs}
    copied = []
    for _ in range(repeats + 1):
        copied.append(copy.bytes_per_second())
        for key, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            seconds[key].append(time.perf_counter() - start)
    return {key: values[1:] for key, values in seconds.items()}, copied[1:]


def _compile(call: Callable, operands: tuple, turns: int) -> tuple[jax.stages.Compiled, str]:
    """A program of ``turns`` times a call on each set of operands, and what the call runs as."""
    lowered = jax.jit(chain(call, turns)).lower(*operands)
    return lowered.compile(), kernel_in(lowered.as_text())


def kernel_in(program: str) -> str:
    """The first kernel that a program's StableHLO calls, or "xla" where it calls none."""
    targets = _CUSTOM_CALL.findall(program)
    return next((name for name in targets if name != "Sharding"), XLA)


def chain(call: Callable, turns: int) -> Callable:
    """``turns`` times one call on each set of operands, each linked to the one before.

    Args:
      call: as of ``Case.call``.
      turns: at least 1.

    Returns:
      A function of the first link, a list of operands that are updated, and a list of others, to
      the last link, the updated operands and the results of the last turn.
    """

    def turn(link, states: Sequence, sets: Sequence):
        updated, results = [], []
        for state, fixed in zip(states, sets, strict=True):
            # Ties the operands to the link: else XLA prepares them once, before the loop, which it
            # cannot do in decoding, where every step writes to them.
            link, fixed = jax.lax.optimization_barrier((link, fixed))
            link, state, result = call(link, state, fixed)
            updated.append(state)
            results.append(result)
        return link, updated, results

    def program(link, states, sets):
        # The results are carried, so that none of them is left out as unused.
        shapes = jax.eval_shape(turn, link, states, sets)[2]
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(
            0, turns, lambda _, carry: turn(carry[0], carry[1], sets), (link, states, results)
        )

    return program


@functools.partial(jax.jit, static_argnums=(0, 1))
def noise(shape: tuple[int, ...], dtype: jnp.dtype, seed: int) -> Array:
    """Numbers spread over [-1, 1), the same in every row; no memory but the result's."""
    count = math.prod(shape[1:])
    index = jax.lax.iota(jnp.uint32, count) + jnp.uint32(977) * jnp.asarray(seed, jnp.uint32)
    index *= jnp.uint32(2654435761)  # modulo 2**32: neighbours land far from each other
    numbers = (index >> 8).astype(jnp.float32) / 2**23 - 1.0
    return jnp.broadcast_to(numbers.astype(dtype).reshape((1, *shape[1:])), shape)


class _Copy:
    """A plain copy of a large array into another one."""

    def __init__(self):
        self._source = jnp.ones((_COPIED_BYTES // 4,), jnp.float32)
        self._target = jnp.zeros_like(self._source)
        # Into a buffer that is there: a new one costs the CPU more than the copy.
        self._copy = jax.jit(lambda source, _: jnp.copy(source), donate_argnums=1, keep_unused=True)
        self.bytes_per_second()

    def bytes_per_second(self, calls: int = 4) -> float:
        """Bytes read and written a second; the calls are queued, and waited for together."""
        start = time.perf_counter()
        for _ in range(calls):
            self._target = self._copy(self._source, self._target)
        jax.block_until_ready(self._target)
        return 2 * _COPIED_BYTES * calls / (time.perf_counter() - start)


def _calls(case: Case, bytes_per_second: float) -> int:
    """Calls of a program: a multiple of the sets, long enough for the host's clock."""
    fastest = case.bytes_moved(case.scorings[-1]) / bytes_per_second
    turns = min(_ROUND_S / fastest, _MOST_CALLS) / num_sets(case)
    return max(round(turns), 1) * num_sets(case)
