"""The scorer's file: what is written is read, and nothing else is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.tiny_model import CONFIG, MODEL, params, prefilled
from safetensors.numpy import save_file
from weights.tiny_files import with_header

from inertiakv_jax import policies, step
from inertiakv_jax.learned_scorer import load_learned, save_learned
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.scoring import LearnedParams

SHAPES = {"query": (4, 8, 64), "key": (2, 8, 64)}


def arrays(seed=0, **changes):
    rng = np.random.default_rng(seed)
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return drawn | changes


def weights(seed=0):
    return LearnedParams(**{name: jnp.asarray(array) for name, array in arrays(seed).items()})


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "scorer.safetensors"
    save_learned(str(path), weights())
    loaded = load_learned(str(path), MODEL)
    for name, array in arrays().items():
        assert np.asarray(getattr(loaded, name)).tobytes() == array.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["scorer.safetensors"]


def test_same_weights_same_bytes(tmp_path):
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        save_learned(str(path), weights())
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_new_file_is_read_anew(tmp_path):
    path = tmp_path / "scorer.safetensors"
    for seed in (0, 1):
        save_learned(str(path), weights(seed))
        loaded = load_learned(str(path), MODEL)
        np.testing.assert_array_equal(loaded.query, arrays(seed)["query"])


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "scorer.safetensors"
    save_learned(str(path), weights())
    before = path.read_bytes()
    (tmp_path / "scorer.safetensors.part").mkdir()  # where the new one would be written
    with pytest.raises(Exception, match="directory"):
        save_learned(str(path), weights(1))
    assert path.read_bytes() == before


def test_read_for_the_first_time_under_a_trace(tmp_path):
    """``step`` in a program of one's own reads the file while it is traced, and keeps no tracer."""
    path = tmp_path / "scorer.safetensors"
    save_learned(str(path), weights())
    policy = policies.learned(0.9, scorer_weights=str(path))
    state, token = prefilled(policies.inertiakv(0.9))
    traced = jax.jit(lambda state, token: step(MODEL, params(), state, token, policy))
    one, _ = traced(state, token)
    other, _ = traced(dataclasses.replace(state, step=state.step + 0), token)
    np.testing.assert_array_equal(one.positions, other.positions)
    assert isinstance(load_learned(str(path), MODEL).query, jax.Array)
    again, _ = jax.jit(lambda state, token: step(MODEL, params(), state, token, policy))(
        state, token
    )
    np.testing.assert_array_equal(one.positions, again.positions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": np.zeros((4, 8, 32), np.float32)}, r"key \('F32', 2, 8, 'f'\)"),
        ({"key": np.zeros((4, 8, 64), np.float32)}, "scorer weights of this model"),
        ({"query": np.zeros((4, 8, 0), np.float32), "key": np.zeros((2, 8, 0), np.float32)}, "0"),
        ({"more": np.zeros(3, np.float32)}, "more"),
        ({"key": arrays()["key"].astype(np.float16)}, "F16"),
        ({"key": np.full((2, 8, 64), np.nan, np.float32)}, "NaN or infinity"),
        ({"query": np.full((4, 8, 64), np.inf, np.float32)}, "NaN or infinity"),
    ],
)
def test_other_arrays_are_refused(changes, message, tmp_path):
    path = tmp_path / "scorer.safetensors"
    save_file(arrays(**changes), path)
    with pytest.raises(ValueError, match=message):
        load_learned(str(path), MODEL)


def test_another_models_weights_are_refused(tmp_path):
    path = tmp_path / "scorer.safetensors"
    save_learned(str(path), weights())
    other = DecoderModel(dataclasses.replace(CONFIG, num_kv_heads=4))
    with pytest.raises(ValueError, match=r"key \('F32', 4, 8, 'f'\), got"):
        load_learned(str(path), other)


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("nothing of the kind")
    claims = {"query": {"dtype": "F32", "shape": [4, 8, 2**40], "data_offsets": [0, 2**47]}}
    (tmp_path / "huge").write_bytes(with_header(claims, b""))
    half = {"query": {"dtype": "BF16", "shape": [4, 8, 1], "data_offsets": [0, 64]}}
    (tmp_path / "bfloat16").write_bytes(with_header(half, bytes(64)))
    for name in ("text", "huge", "."):
        with pytest.raises(ValueError, match="not a safetensors file"):
            load_learned(str(tmp_path / name), MODEL)
    with pytest.raises(ValueError, match="BF16"):
        load_learned(str(tmp_path / "bfloat16"), MODEL)
    with pytest.raises(ValueError, match=r"no scorer weights at .*No such file"):
        load_learned(str(tmp_path / "missing"), MODEL)
