"""The Flax decoder against hand-made numbers and the NumPy transformer in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import llama
from oracle.tiny import random_params

from inertiakv_jax import policies, prefill
from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.hf_names import expected_tensors
from inertiakv_jax.models.layers import RMSNorm, rotary_embedding, rotate
from inertiakv_jax.rope_scaling import RopeScaling
from inertiakv_jax.typing import Model

# N * D differs from H, so that no two axes can be confused.
CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
VARIANTS = {
    "untied": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True),
    "biases": dataclasses.replace(CONFIG, family="qwen2", attention_bias=True),
    "llama3": dataclasses.replace(CONFIG, rope_theta=500000.0, rope_scaling=LLAMA3),
    "one kv head": dataclasses.replace(CONFIG, num_kv_heads=1),
    "as many kv heads": dataclasses.replace(CONFIG, num_kv_heads=4),
}
BIASES = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
GEMMA = {"qk_norm": True, "post_norms": True, "unit_offset_norms": True}
MOE = {"qk_norm": True, "experts": ExpertsConfig(4, 2, 24, dense_layers=(1,))}
CHANGES = [{}, {"tie_word_embeddings": True}, BIASES, GEMMA, MOE]
LOGITS_TOLERANCE = 2e-5  # absolute, of logits up to 14; observed 6.1e-6


def last_logits(model, params, tokens):
    lengths = np.array([len(tokens)])
    policy = policies.inertiakv(0.9)
    return prefill(model, params, np.asarray(tokens)[None], lengths, policy)[1][0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_against_float64(name):
    config = VARIANTS[name]
    tied = config.tie_word_embeddings
    tree = random_params(config, seed=3, bias=config.attention_bias, tied=tied)
    tree = llama.cast(tree, np.float32)
    tokens = np.random.default_rng(4).integers(0, 97, size=90)
    _, expected = llama.prefill(llama.cast(tree, np.float64), config, tokens)
    logits = last_logits(DecoderModel(config), jax.tree.map(jnp.asarray, tree), tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_those_of_the_table(changes, dtype):
    config = dataclasses.replace(CONFIG, **changes)
    shapes = jax.eval_shape(DecoderModel(config, dtype).init, jax.random.key(0))
    got = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(shapes)
    }
    expected = {}
    for tensor in expected_tensors(config):
        shape = tensor.shape[::-1] if tensor.transpose else tensor.shape
        expected[tensor.path] = shape if tensor.expert is None else (4, *shape)
    assert got == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(dtype)}


def test_model_is_a_value_of_the_protocol():
    model = DecoderModel(CONFIG)
    assert isinstance(model, Model)
    assert model == DecoderModel(CONFIG)
    assert hash(model) == hash(DecoderModel(CONFIG))
    assert model != DecoderModel(CONFIG, "bfloat16")
    sizes = (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim)
    assert sizes == (2, 4, 2, 16)
    assert (model.vocab_size, model.max_positions, model.dtype) == (
        CONFIG.vocab_size,
        256,
        "float32",
    )


def test_rotation_by_hand():
    """One pair turns by its position: (1, 0) to (cos p, sin p)."""
    config = dataclasses.replace(CONFIG, head_dim=2)
    rotation = rotary_embedding(config, jnp.asarray([[0, 1, 4]]))
    x = jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (1, 3, 1, 2))
    expected = [[1.0, 0.0], [0.540302, 0.841471], [-0.653644, -0.756802]]
    np.testing.assert_allclose(rotate(x, rotation)[0, :, 0], expected, atol=1e-6)
    x = jnp.broadcast_to(jnp.asarray([0.0, 1.0]), (1, 3, 1, 2))
    expected = [[0.0, 1.0], [-0.841471, 0.540302], [0.756802, -0.653644]]
    np.testing.assert_allclose(rotate(x, rotation)[0, :, 0], expected, atol=1e-6)


def test_rotated_pairs_are_halves_of_a_head():
    """theta 100 and D 4: pair (0, 2) turns by 1 a position, pair (1, 3) by 0.1."""
    config = dataclasses.replace(CONFIG, head_dim=4, rope_theta=100.0)
    rotation = rotary_embedding(config, jnp.asarray([[2]]))
    got = rotate(jnp.asarray([[[[1.0, 2.0, 0.0, 0.0]]]]), rotation)[0, 0, 0]
    np.testing.assert_allclose(got, [-0.416147, 1.960133, 0.909297, 0.397339], atol=1e-6)


def test_rotation_keeps_products_of_equal_distance():
    """<R(p) q, R(p - 3) k> does not depend on p, up to the last position."""
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    products = []
    for position in (3, 100, 255):
        turned = [
            rotate(jnp.asarray(x), rotary_embedding(CONFIG, jnp.asarray([[place]])))
            for x, place in ((query, position), (key, position - 3))
        ]
        products.append(float((turned[0] * turned[1]).sum()))
    np.testing.assert_allclose(products, products[0], rtol=1e-4)


def test_rms_norm_by_hand():
    """Mean square of (3, 4) is 12.5."""
    norm = RMSNorm(epsilon=1e-5, dtype=jnp.dtype("float32"))
    scale = {"params": {"scale": jnp.asarray([1.0, 2.0])}}
    got = norm.apply(scale, jnp.asarray([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(got, [[0.848528, 2.262741], [0.0, 0.0]], atol=1e-5)


def test_logits_of_any_leading_shape():
    model = DecoderModel(CONFIG)
    params = jax.tree.map(jnp.asarray, llama.cast(random_params(CONFIG, seed=3), np.float32))
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32)), jnp.float32)
    whole = model.logits(params, hidden)
    assert whole.shape == (2, 3, 97)
    np.testing.assert_allclose(model.logits(params, hidden[1, 2]), whole[1, 2], atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16(tied):
    """Close to float32 from the same rounded weights; logits come out as float32."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    tree = llama.cast(random_params(config, seed=3, tied=tied), np.float32)
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    tokens = np.random.default_rng(4).integers(0, 97, size=90)
    got = last_logits(DecoderModel(config, "bfloat16"), half, tokens)
    expected = last_logits(DecoderModel(config), wide, tokens)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=0.3)  # of logits up to 14; observed 0.13
