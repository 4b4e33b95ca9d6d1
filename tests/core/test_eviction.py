import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv_jax import eviction

select_kept = jax.jit(eviction.select_kept)
compaction = jax.jit(eviction.compaction, static_argnames="slots")
DRAWN = settings(max_examples=60, deadline=None, derandomize=True)
SLOTS = 9


def lowest(scores, positions, candidates):
    """One-hot mask [1, S] of the candidate with the lowest score, of equals the lowest position."""
    gone = np.zeros((1, scores.shape[1]), bool)
    ranked = sorted(
        (float(scores[0, slot]), int(positions[0, slot]), slot)
        for slot in np.flatnonzero(candidates[0])
    )
    if ranked:
        gone[0, ranked[0][2]] = True
    return gone


def row(*values, dtype=jnp.float32):
    return jnp.asarray([values], dtype)


def kept_positions(scores, budget, *, first=0, recent=0):
    """Positions kept of tokens 0, 1, ... that lie in order."""
    count = len(scores)
    valid, positions = jnp.ones((1, count), bool), jnp.arange(count)[None]
    candidates = eviction.evictable(valid, positions, jnp.asarray([count]), first, recent)
    kept = select_kept(row(*scores), positions, valid, candidates, jnp.asarray([budget]))
    return set(np.flatnonzero(kept[0]).tolist())


@pytest.mark.parametrize(
    ("first", "recent", "expected"),
    [
        (0, 0, [True, True, True, False, True]),
        (2, 0, [False, True, True, False, True]),
        (0, 2, [True, True, False, False, False]),
        (2, 2, [False, True, False, False, False]),
        (6, 0, [False, False, True, False, True]),
        (9, 9, [False] * 5),
    ],
)
def test_evictable(first, recent, expected):
    """Slots hold positions 0, 3, 8, none, 7 of a text of 9 tokens."""
    valid = jnp.asarray([[True, True, True, False, True]])
    positions = row(0, 3, 8, -1, 7, dtype=jnp.int32)
    got = eviction.evictable(valid, positions, jnp.asarray([9]), first, recent)
    # 7 is among the two latest positions of a text whose next position is 9
    assert got.tolist() == [expected]


@pytest.mark.parametrize("scores", [[0.5] * 4, [0.0] * 4, [0.5, 0.5, 0.5, -5.0]])
def test_no_tie_and_no_score_breaks_a_protection(scores):
    assert kept_positions(scores, 2, recent=1) == {2, 3}  # ties: the lower position goes first
    assert kept_positions(scores, 2, first=1, recent=1) == {0, 3}
    assert kept_positions(scores, 2, first=2) == {0, 1}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, {2}),
        (2, {2, 4}),
        (3, {1, 2, 4}),
        (4, {1, 2, 3, 4}),
        (5, {0, 1, 2, 3, 4}),
        (9, {*range(5)}),
    ],
)
def test_select_kept(budget, expected):
    assert kept_positions([0.1, 0.3, 0.9, 0.2, 0.4], budget) == expected


def test_select_kept_stops_when_only_protected_tokens_are_left():
    assert kept_positions([0.1, 0.3, 0.9, 0.2], 1, first=2) == {0, 1}


def test_select_kept_gives_each_row_its_own_budget():
    scores = jnp.asarray([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.3, 0.2, 0.1]])
    positions = jnp.broadcast_to(jnp.arange(3), (3, 3))
    valid = jnp.asarray([[True, True, True], [True, True, True], [True, True, False]])
    kept = select_kept(scores, positions, valid, valid, jnp.asarray([1, 2, 2**31 - 1]))
    assert kept.tolist() == [[False, False, True], [True, True, False], [True, True, False]]


def evict(scores, positions, *, budget, increment=None, active=True, **knobs):
    """One row through ``evict_lowest``: utilities and positions, None where the slot is free."""
    left, at = eviction.evict_lowest(
        row(*scores),
        None if increment is None else row(*increment),
        row(*positions, dtype=jnp.int32),
        jnp.asarray([10]),
        jnp.asarray([budget]),
        jnp.asarray([active]),
        **{"decay": 1.0, **knobs},
    )
    return np.asarray(left)[0].tolist(), np.asarray(at)[0].tolist()


def test_evict_lowest():
    # Of the two at 0.25 position 2 goes; the free slot, at 0, is no candidate.
    scores, positions = (0.5, 0.25, 0.25, 0.0), (5, 9, 2, -1)
    assert evict(scores, positions, budget=2) == ([0.5, 0.25, 0.0, 0.0], [5, 9, -1, -1])
    assert evict(scores, positions, budget=3) == (list(scores), list(positions))
    assert evict(scores, positions, budget=2, active=False) == (list(scores), list(positions))
    assert evict(scores, positions, budget=2, protect_first=3)[1] == [5, -1, 2, -1]
    assert evict(scores, positions, budget=2, protect_first=3, protect_recent=2)[1] == [
        -1,
        9,
        2,
        -1,
    ]


def test_evict_lowest_ages_first():
    got = evict((0.5, 0.25), (0, 1), budget=1, increment=(0.0, 0.5), decay=0.5)
    assert got == ([0.0, 0.625], [-1, 1])


def test_each_ranking_evicts_its_own():
    """Two layers of one row with two heads each: [E, B, K, S]."""
    scores = jnp.asarray([[[[1.0, 2.0], [2.0, 1.0]]], [[[3.0, 0.5], [0.5, 0.5]]]])
    positions = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (2, 1, 2, 2))
    lead = (2, 1, 2)
    _, left = eviction.evict_lowest(
        scores,
        None,
        positions,
        jnp.full(lead, 2),
        jnp.asarray([[[1, 1]], [[1, 2]]]),
        jnp.ones(lead, bool),
        decay=1.0,
    )
    assert left.tolist() == [[[[-1, 1], [0, -1]]], [[[0, -1], [0, 1]]]]


@st.composite
def rows_of_slots(draw):
    """Scores with many ties, distinct positions in any order, some slots free, some protected."""
    scores = draw(
        st.lists(st.sampled_from([0.0, -0.0, 0.25, 0.5, 1e-30]), min_size=SLOTS, max_size=SLOTS)
    )
    positions = draw(st.permutations(range(SLOTS)))
    valid = draw(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS))
    protected = draw(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS))
    valid = np.asarray([valid])
    return (
        jnp.asarray([scores], jnp.float32),
        jnp.asarray([positions], jnp.int32),
        jnp.asarray(valid),
        jnp.asarray(valid & ~np.asarray([protected])),
        draw(st.integers(0, SLOTS + 1)),
    )


@given(rows_of_slots())
@DRAWN
def test_select_kept_equals_dropping_the_lowest_one_at_a_time(drawn):
    scores, positions, valid, candidates, budget = drawn
    expected, left = np.asarray(valid), np.asarray(candidates)
    while expected.sum() > budget and left.any():
        gone = lowest(scores, positions, left)
        assert gone.sum() == 1
        expected, left = expected & ~gone, left & ~gone
    got = select_kept(scores, positions, valid, candidates, jnp.asarray([budget]))
    np.testing.assert_array_equal(got, expected)


@given(rows_of_slots(), st.permutations(range(SLOTS)))
@DRAWN
def test_selection_does_not_depend_on_slots(drawn, order):
    scores, positions, valid, candidates, budget = drawn
    order = jnp.asarray(order)

    def moved(x):
        return x[:, order]

    arrays = (scores, positions, valid, candidates)
    kept = select_kept(*arrays, jnp.asarray([budget]))
    moved_kept = select_kept(*map(moved, arrays), jnp.asarray([budget]))
    np.testing.assert_array_equal(moved_kept, moved(kept))


def test_compaction_orders_by_position():
    kept = jnp.asarray([[True, False, True, True], [False, True, False, False]])
    positions = jnp.asarray([[7, 0, 2, 5], [3, 9, 4, 6]])
    source, valid = compaction(kept, positions, slots=3)
    assert source[0].tolist() == [2, 3, 0]
    assert source[1, 0] == 1
    assert valid.tolist() == [[True, True, True], [True, False, False]]
    assert source.dtype == jnp.int32


@given(rows_of_slots())
@DRAWN
def test_compaction_moves_every_kept_token(drawn):
    _, positions, kept, _, _ = drawn
    source, valid = compaction(kept, positions, slots=SLOTS)
    moved = np.asarray(positions)[0][np.asarray(source)[0]][np.asarray(valid)[0]].tolist()
    assert moved == sorted(np.asarray(positions)[np.asarray(kept)].tolist())
    assert int(source.min()) >= 0
    assert int(source.max()) < SLOTS
