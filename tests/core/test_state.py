import dataclasses

import jax
import jax.numpy as jnp
import pytest
from core.tiny_model import CONFIG, MODEL
from hypothesis import given
from hypothesis import strategies as st

from inertiakv_jax import state as kv_state
from inertiakv_jax.attention import DecodeCache
from inertiakv_jax.models.decoder import DecoderModel


def empty(batch=2, slots=4, **options):
    return kv_state.init(MODEL, batch, slots, budget=jnp.full((batch,), 3), **options)


def test_init_holds_nothing():
    state = empty(kept_slots=2)
    assert [leaf.shape for leaf in state.keys + state.values] == [(2, 2, 4, 8)] * 6
    assert {leaf.dtype for leaf in state.keys + state.values} == {jnp.dtype("float32")}
    expected = {
        "scores": ((2, 4), "float32", 0.0),
        "valid": ((2, 4), "bool", False),
        "positions": ((2, 4), "int32", -1),
        "next_position": ((2,), "int32", 0),
        "budget": ((2,), "int32", 3),
        "finished": ((2,), "bool", False),
        "finite": ((2,), "bool", True),
        "step": ((), "int32", 0),
    }
    for name, (shape, dtype, fill) in expected.items():
        leaf = getattr(state, name)
        assert (leaf.shape, str(leaf.dtype)) == (shape, dtype), name
        assert (leaf == fill).all(), name
    assert state.num_slots == 4
    assert state.num_held.tolist() == [0, 0]
    assert state.free_slot.tolist() == [0, 0]
    assert state.kept_slots == 2


def test_dtype_of_keys_and_values():
    half = kv_state.init(DecoderModel(CONFIG, "bfloat16"), 1, 4, budget=jnp.asarray([1]))
    assert half.keys[0].dtype == half.values[2].dtype == jnp.bfloat16
    assert half.scores.dtype == jnp.float32


def test_bytes():
    assert empty().kv_bytes() == 2 * 3 * (2 * 2 * 4 * 8) * 4  # k and v, layers, [B, K, S, D], f32


def test_free_slot_is_the_first_or_none():
    valid = jnp.asarray([[True, False, True, False], [True] * 4, [False] * 4])
    state = dataclasses.replace(empty(batch=3), valid=valid)
    assert state.free_slot.tolist() == [1, 4, 0]
    assert state.num_held.tolist() == [2, 4, 0]
    assert state.free_slot.dtype == state.num_held.dtype == jnp.int32


def test_state_is_a_frozen_pytree():
    state = empty(kept_slots=2)
    leaves, structure = jax.tree.flatten(state)
    assert len(leaves) == 2 * 3 + 9
    assert jax.tree.unflatten(structure, leaves).kept_slots == 2
    assert structure != jax.tree.structure(empty())
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = jnp.int32(1)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("batch", "slots"), [(0, 4), (2, 0), (-1, 4)])
def test_bad_sizes(batch, slots):
    with pytest.raises(ValueError, match=f"batch={batch} and slots={slots}"):
        kv_state.init(MODEL, batch, slots, budget=jnp.ones((2,), jnp.int32))


def test_bad_budget():
    with pytest.raises(ValueError, match=r"budget must have shape \(2,\), got \(3,\)"):
        kv_state.init(MODEL, 2, 4, budget=jnp.ones((3,), jnp.int32))


@pytest.mark.parametrize(
    ("tokens", "multiple", "slots"),
    [
        (1, 64, 64),
        (64, 64, 64),
        (65, 64, 128),
        (256, 256, 256),
        (257, 256, 512),
        (410, 64, 448),
        (512, 64, 512),
        (1024, 64, 1024),
        (1025, 64, 1152),
        (2049, 256, 2304),
        (4096, 256, 4096),
        (4097, 256, 4608),
        (128 * 1024 + 1, 256, 144 * 1024),
    ],
)
def test_slots_for(tokens, multiple, slots):
    assert kv_state.slots_for(tokens, multiple=multiple) == slots


@given(st.integers(1, 2**20), st.sampled_from([64, 256]))
def test_slots_are_enough_and_an_eighth_is_spare_at_most(tokens, multiple):
    slots = kv_state.slots_for(tokens, multiple=multiple)
    assert tokens <= slots < tokens + max(multiple, tokens / 8 + 1)
    assert slots % multiple == 0
    assert kv_state.slots_for(slots, multiple=multiple) == slots


@pytest.mark.parametrize(
    ("slot", "expected"),
    [(1, [1, 9, 3, 4]), (3, [1, 2, 3, 9]), (4, [1, 2, 3, 4])],  # slot 4 is past the end
)
def test_a_token_is_written_to_its_slot_or_nowhere(slot, expected):
    """Past the end nothing is written; a clamped index would destroy the last token."""
    leaf = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4, 1)
    cache = DecodeCache(
        keys=(leaf,),
        values=(leaf * 10,),
        slot=jnp.asarray([slot]),
        valid=jnp.ones((1, 4), bool),
        positions=jnp.arange(4)[None],
        position=jnp.asarray([4]),
        active=jnp.asarray([True]),
        row=jnp.asarray([0]),
        windows=(None,),
        layer_weights=jnp.ones((1,)),
        increment=None,
    )
    token = jnp.full((1, 1, 1, 1), 9.0)
    _, cache = jax.jit(DecodeCache.attend, static_argnums=1)(cache, 0, token, token, token * 10)
    assert cache.keys[0].ravel().tolist() == expected
    assert cache.values[0].ravel().tolist() == [10 * x for x in expected]
