"""Decode attention, timed: with the mass, without it, and a plain copy, in turns.

A call on the host returns before the device has computed anything, and costs as much as a short
attention. So many calls run in one program, as they do in decoding: a loop whose every call takes
the output of the last one as its query, over several caches, one after the other, as layers do.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from inertiakv_jax.pallas_kernels.decode_attention.api import decode_attention
from inertiakv_jax.pallas_kernels.decode_attention.shapes import Heads

KERNEL = "decode_attention"
XLA = "xla"

COLD_BYTES = 128 * 2**20
"""Keys and values that are more than this do not stay in a device's cache from turn to turn."""

_MOST_CACHES, _MOST_CALLS = 16, 1000
_COPIED_BYTES = 512 * 2**20
_ROUND_S = 0.02  # of a program, were it as fast as a copy
_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @\"?([\w$.]+)")


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode step's attention in one layer."""

    heads: Heads
    batch: int
    """B."""
    slots: int
    """S."""
    dtype: str
    """Of query, keys and values."""

    def __post_init__(self):
        if self.batch < 1 or self.slots < 1:
            raise ValueError(
                f"batch and slots must be at least 1, got {self.batch} and {self.slots}"
            )

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.heads.kv_bytes(self.batch, self.slots, self._itemsize)

    def bytes_moved(self, return_mass: bool) -> int:
        """Bytes that a single pass cannot do without: each operand and each result once.

        Keys, values, query, output, the bool mask [B, S] and, with it, the float32 mass. What an
        implementation writes for itself is not in it, and so lowers its bandwidth.
        """
        small = 2 * self.batch * self.heads.num_heads * self.heads.head_dim * self._itemsize
        mass = self.heads.mass_bytes(self.batch, self.slots) if return_mass else 0
        return self.kv_bytes + small + self.batch * self.slots + mass

    @property
    def caches(self) -> int:
        """Keys and values that the calls go through: over ``COLD_BYTES`` together, or 16."""
        return min(COLD_BYTES // self.kv_bytes + 1, _MOST_CACHES)

    @property
    def cold(self) -> bool:
        """Whether the keys and values come from memory, and not from a cache of the device."""
        return self.caches * self.kv_bytes > COLD_BYTES

    @property
    def memory_bytes(self) -> int:
        """What the measurement needs, about: the caches, one of them in float32, and the copy."""
        in_float32 = self.heads.kv_bytes(self.batch, self.slots, 4)
        return self.caches * self.kv_bytes + in_float32 + 2 * _COPIED_BYTES

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of one case, one number a round.

    Attributes:
      runs_as: the custom call that ``implementation`` became, or "xla" where it became none.
      calls: attentions in each round's program.
      with_mass: seconds of one attention that also returns the mass.
      without_mass: seconds of one that does not.
      xla_with_mass: as ``with_mass`` of what XLA makes of the reference; empty if ``runs_as`` it.
      xla_without_mass: likewise.
      copy_bytes_per_second: bytes read and written by a plain copy of a large array.
    """

    runs_as: str
    calls: int
    with_mass: list[float]
    without_mass: list[float]
    xla_with_mass: list[float]
    xla_without_mass: list[float]
    copy_bytes_per_second: list[float]


def measure(case: Case, *, implementation: str | None, repeats: int) -> Measured:
    """Time one case on the default device.

    All contestants take turns, so that a device that slows down slows all of them; one round to
    warm up does not count. Each call depends on the one before it, and the device is waited for.

    Args:
      case: the shapes and dtype.
      implementation: as in ``api.decode_attention``.
      repeats: rounds that count, at least 1.

    Raises:
      ValueError: ``implementation`` is unknown or cannot run here, or ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    operands = _operands(case)
    copy = _Copy()
    calls = _calls(case, copy.bytes_per_second())
    compiled = {
        flag: _compile(operands, implementation, flag, calls // case.caches)
        for flag in (True, False)
    }
    runs_as = compiled[True][1]
    programs = {(flag, False): program for flag, (program, _) in compiled.items()}
    if runs_as != XLA:
        for flag in (True, False):
            programs[flag, True] = _compile(operands, XLA, flag, calls // case.caches)[0]
    seconds, copied = _take_turns(programs, operands, copy, repeats)
    times = {key: [elapsed / calls for elapsed in values] for key, values in seconds.items()}
    return Measured(
        runs_as=runs_as,
        calls=calls,
        with_mass=times[True, False],
        without_mass=times[False, False],
        xla_with_mass=times.get((True, True), []),
        xla_without_mass=times.get((False, True), []),
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


def _compile(
    operands, implementation: str | None, return_mass: bool, turns: int
) -> tuple[jax.stages.Compiled, str]:
    """A program of ``turns`` times an attention over each cache, and what the attention runs as."""
    attend = functools.partial(
        decode_attention, return_mass=return_mass, implementation=implementation
    )
    lowered = jax.jit(chain(attend, turns)).lower(*operands)
    return lowered.compile(), kernel_in(lowered.as_text())


def kernel_in(program: str) -> str:
    """The first kernel that a program's StableHLO calls, or "xla" where it calls none."""
    targets = _CUSTOM_CALL.findall(program)
    return next((name for name in targets if name != "Sharding"), XLA)


def chain(attend: Callable, turns: int) -> Callable:
    """``turns`` times one attention over each cache, each fed with the output of the last.

    Args:
      attend: (query, keys, values, valid) to (output, mass or None).
      turns: at least 1.

    Returns:
      A function of query [B, N, D], a list of (keys, values) [B, K, S, D] each, and valid [B, S],
      to the last output and the masses of the last turn.
    """

    def turn(query, caches, valid):
        masses = []
        for keys, values in caches:
            # Ties the cache to the query: else XLA prepares it once, before the loop, which it
            # cannot do in decoding, where every step writes to it.
            query, keys, values, seen = jax.lax.optimization_barrier((query, keys, values, valid))
            query, mass = attend(query, keys, values, seen)
            masses.append(mass)
        return query, masses

    def program(query, caches, valid):
        # The masses are carried, so that none of them is left out as unused.
        _, shapes = jax.eval_shape(turn, query, caches, valid)
        masses = jax.tree.map(lambda mass: jnp.zeros(mass.shape, mass.dtype), shapes)
        return jax.lax.fori_loop(
            0, turns, lambda _, carry: turn(carry[0], caches, valid), (query, masses)
        )

    return program


def _operands(case: Case) -> tuple[Array, list[tuple[Array, Array]], Array]:
    heads, dtype = case.heads, jnp.dtype(case.dtype)
    query = _noise((case.batch, heads.num_heads, heads.head_dim), dtype, 0)
    shape = (case.batch, heads.num_kv_heads, case.slots, heads.head_dim)
    caches = [
        (_noise(shape, dtype, 2 * i + 1), _noise(shape, dtype, 2 * i + 2))
        for i in range(case.caches)
    ]
    return query, caches, jnp.ones((case.batch, case.slots), jnp.bool_)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _noise(shape: tuple[int, ...], dtype: jnp.dtype, seed: int) -> Array:
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
    """Attentions of a program: a multiple of the caches, long enough for the host's clock."""
    fastest = case.bytes_moved(False) / bytes_per_second
    turns = min(_ROUND_S / fastest, _MOST_CALLS) / case.caches
    return max(round(turns), 1) * case.caches
