"""The eviction step, plain and as TPU kernel, against a list that forgets one token at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from inertiakv_jax import aggregation, eviction
from inertiakv_jax.pallas_kernels.evict import ref, tpu
from inertiakv_jax.pallas_kernels.evict.api import evict

IMPLEMENTATIONS = {"xla": ref.evict, "tpu": functools.partial(tpu.evict, interpret=True)}
SHAPES = [(1, 1), (3, 7), (2, 130), (9, 300), (4, 2, 65), (2, 3, 4, 33), (5, 2, 8, 128)]


def random_rows(shape, seed=0):
    """Rows as decoding has them: distinct positions in any slots, the rest free."""
    rng = np.random.default_rng(seed)
    *lead, slots = shape
    free = rng.random(shape) < 0.2
    positions = np.argsort(rng.random((*lead, 2 * slots)), axis=-1)[..., :slots].astype(np.int32)
    positions = np.where(free, -1, positions).astype(np.int32)
    # Multiples of 1/64, so that ageing by 0.5 is exact, and many tie.
    scores, increment = (np.where(free, 0, rng.integers(8, size=shape) / 64) for _ in range(2))
    held = (positions >= 0).sum(-1)
    return {
        "scores": scores.astype(np.float32),
        "increment": increment.astype(np.float32),
        "positions": positions,
        "next_position": np.full(lead, 2 * slots, np.int32),
        "budget": (held - rng.integers(2, size=lead)).astype(np.int32),
        "active": rng.random(lead) < 0.8,
    }


def by_hand(scores, increment, positions, next_position, budget, active, knobs):
    """Row by row, token by token."""
    decay, protect_first, protect_recent = knobs
    scores, positions = scores.copy(), positions.copy()
    slots = np.full(active.shape, scores.shape[-1], np.int32)
    for row in np.ndindex(active.shape):
        if not active[row]:
            continue
        if increment is not None:
            scores[row] = decay * scores[row] + increment[row]
        held = [slot for slot in range(scores.shape[-1]) if positions[row][slot] >= 0]
        if len(held) <= budget[row]:
            continue
        may_go = [
            (scores[row][slot], positions[row][slot], slot)
            for slot in held
            if protect_first <= positions[row][slot] < next_position[row] - protect_recent
        ]
        if may_go:
            slot = min(may_go)[2]
            slots[row] = slot
            scores[row][slot], positions[row][slot] = 0.0, -1
    return scores, positions, slots


def check(implementation, rows, knobs=(0.5, 0, 0)):
    arrays = [None if rows[name] is None else jnp.asarray(rows[name]) for name in rows]
    decay, first, recent = knobs
    scalars = (jnp.float32(decay), jnp.int32(first), jnp.int32(recent))
    got = jax.jit(IMPLEMENTATIONS[implementation])(*arrays, *scalars)
    expected = by_hand(*rows.values(), knobs)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    return got


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_lists(implementation, shape):
    check(implementation, random_rows(shape))
    check(implementation, random_rows(shape, seed=1), (0.5, 2, shape[-1] // 2))
    check(implementation, random_rows(shape, seed=2) | {"increment": None})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_awkward_rows(implementation):
    """Empty; all free but one; all tied; all protected; at its budget; over it, but finished."""
    positions = np.full((6, 4), -1, np.int32)
    positions[1, 2] = 7
    positions[2:] = [6, 5, 7, 4]
    rows = {
        "scores": np.where(positions < 0, 0, np.float32(0.25)),
        "increment": np.zeros((6, 4), np.float32),
        "positions": positions,
        "next_position": np.asarray([8, 8, 8, 4, 8, 8], np.int32),
        "budget": np.asarray([0, 0, 3, 3, 4, 3], np.int32),
        "active": np.asarray([True, True, True, True, True, False]),
    }
    scores, left, slot = check(implementation, rows, (1.0, 2, 0))
    assert slot.tolist() == [4, 2, 3, 4, 4, 4]
    assert left[1].tolist() == [-1, -1, -1, -1]
    assert left[2].tolist() == [6, 5, 7, -1]
    assert scores[2].tolist() == [0.25, 0.25, 0.25, 0.0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_order_of_slots_does_not_matter(implementation):
    rows = random_rows((4, 65), seed=3)
    order = np.random.default_rng(4).permutation(65)
    _, left, slot = check(implementation, rows)
    moved = {k: v[:, order] if v.ndim == 2 else v for k, v in rows.items()}
    _, moved_left, moved_slot = check(implementation, moved)
    np.testing.assert_array_equal(moved_left, left[:, order])
    inside = np.asarray(slot) < 65
    assert inside.any()
    np.testing.assert_array_equal(order[moved_slot[inside]], slot[inside])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_like_the_separate_steps(implementation):
    """Ageing, what may go and the choice as the library has them apart, on any float utilities."""
    rows = random_rows((6, 200), seed=5)
    rng = np.random.default_rng(6)
    for name in ("scores", "increment"):
        drawn = rng.random((6, 200)).astype(np.float32)
        rows[name] = np.where(rows["positions"] < 0, np.float32(0), drawn)
    rows["active"][:] = True
    arrays = {name: jnp.asarray(array) for name, array in rows.items()}
    decay, first, recent = jnp.float32(0.8), jnp.int32(3), jnp.int32(20)
    scores, left, _ = jax.jit(IMPLEMENTATIONS[implementation])(
        *arrays.values(), decay, first, recent
    )
    valid = arrays["positions"] >= 0
    aged = aggregation.aggregate(arrays["scores"], arrays["increment"], decay)
    candidates = eviction.evictable(
        valid, arrays["positions"], arrays["next_position"], first, recent
    )
    over = valid.sum(-1) > arrays["budget"]
    budget = valid.sum(-1, dtype=jnp.int32) - over.astype(jnp.int32)
    freed = valid & ~eviction.select_kept(aged, arrays["positions"], valid, candidates, budget)
    np.testing.assert_array_equal(left >= 0, valid & ~freed)
    # One rounding more or less, where product and sum are one instruction.
    np.testing.assert_allclose(scores, jnp.where(freed, 0.0, aged), rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repeated_until_the_budget(implementation):
    """Each step frees one token a row, the lowest first, and stops at the budget."""
    positions = jnp.asarray([[3, 0, 2, 1], [9, 8, 7, 6]])
    state = (jnp.asarray([[3.0, 0.5, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]]), positions)
    budget = jnp.asarray([1, 2])
    for expected in ([1, 3], [3, 2], [2, 4], [4, 4]):
        *state, slot = jax.jit(IMPLEMENTATIONS[implementation])(
            state[0],
            None,
            state[1],
            jnp.asarray([10, 10]),
            budget,
            jnp.asarray([True, True]),
            jnp.float32(1.0),
            jnp.int32(0),
            jnp.int32(0),
        )
        assert slot.tolist() == expected
    assert (state[1] >= 0).sum(-1).tolist() == [1, 2]


@given(data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_drawn_shapes(data):
    lead = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    shape = (*lead, data.draw(st.integers(1, 260)))
    seed = data.draw(st.integers(0, 99))
    knobs = (0.5, data.draw(st.integers(0, 5)), data.draw(st.integers(0, 300)))
    kinds = ["xla"] if tpu.refusal(shape) else ["xla", "tpu"]
    check(data.draw(st.sampled_from(kinds)), random_rows(shape, seed), knobs)


# The simulation of memory cannot return an array in place whose last block is ragged.
SIMULATED = pltpu.InterpretParams(uninitialized_memory="nan")
SEVERAL_BLOCKS = [((4, 8, 13_000), SIMULATED), ((5, 8, 13_000), True), ((20, 40_000), True)]


@pytest.mark.parametrize(("shape", "interpret"), SEVERAL_BLOCKS, ids=str)
def test_several_blocks(shape, interpret):
    rows = random_rows(shape)
    scalars = (jnp.float32(0.5), jnp.int32(0), jnp.int32(0))
    got = tpu.evict(*map(jnp.asarray, rows.values()), *scalars, interpret=interpret)
    for a, b in zip(got, by_hand(*rows.values(), (0.5, 0, 0)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_default_is_plain_jax_on_a_cpu():
    rows = {name: jnp.asarray(array) for name, array in random_rows((3, 7)).items()}
    options = {"decay": 0.5, "protect_first": 1}
    got = jax.jit(evict)(**rows, **options)
    expected = evict(**rows, **options, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_errors_name_what_was_expected():
    rows = {name: jnp.asarray(array) for name, array in random_rows((3, 7)).items()}
    for name, wrong, message in (
        ("increment", rows["increment"][:, :6], r"increment must be float32 \(3, 7\).*\(3, 6\)"),
        ("positions", rows["scores"], r"positions must be int32 \(3, 7\), got float32"),
        ("budget", rows["budget"][:2], r"budget must be int32 \(3,\), got int32 \(2,\)"),
        ("active", rows["budget"], r"active must be bool \(3,\), got int32 \(3,\)"),
        ("scores", jnp.ones(7), r"with leading axes, got shape \(7,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            evict(**(rows | {name: wrong}), decay=0.5)
    with pytest.raises(ValueError, match="None or one of xla, tpu, got 'gpu'"):
        evict(**rows, decay=0.5, implementation="gpu")


@pytest.mark.parametrize(
    ("shape", "message"),
    [((8, 200_000), "8 rows of 200000 slots do not fit"), ((2, 3, 64), "1, 2, 4 or a multiple")],
)
def test_refused_shapes(shape, message):
    wide = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in ("scores", "increment")}
    row = jax.ShapeDtypeStruct(shape[:-1], jnp.int32)
    rows = wide | {
        "positions": jax.ShapeDtypeStruct(shape, jnp.int32),
        "next_position": row,
        "budget": row,
        "active": jax.ShapeDtypeStruct(shape[:-1], jnp.bool_),
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(evict, decay=0.5, implementation="tpu"), **rows)
    scores, _, slot = jax.eval_shape(functools.partial(evict, decay=0.5), **rows)
    assert (scores.shape, slot.shape) == (shape, shape[:-1])
