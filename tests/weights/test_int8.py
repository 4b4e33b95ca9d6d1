"""int8 weights: numbers by hand, errors within half a step, and what stays as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights.tiny_files import LLAMA, hf_tensors, write_folder

import inertiakv_jax as ikv
from inertiakv_jax import policies
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.layers import Int8Linear
from inertiakv_jax.weights.hf_config import config_from_hf

MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
UP = "model.layers.0.mlp.up_proj.weight"


def test_numbers_by_hand(tmp_path):
    """A row's step is its largest number over 127."""
    tensors = hf_tensors(LLAMA)
    tensors[UP][:3] = 0.0
    tensors[UP][0, :4] = [12.7, -6.4, 0.04, 0.06]
    tensors[UP][1, :2] = [-254.0, 3.1]
    up = ikv.load(write_folder(tmp_path, LLAMA, tensors), quantize="int8").params["layers_0"][
        "mlp"
    ]["up_proj"]
    assert (up["kernel"].dtype, up["scale"].dtype) == (jnp.int8, jnp.float32)
    assert (up["kernel"].shape, up["scale"].shape) == ((32, 64), (64,))
    assert up["kernel"][:4, 0].tolist() == [127, -64, 0, 1]
    assert up["kernel"][:2, 1].tolist() == [-127, 2]
    np.testing.assert_allclose(up["scale"][:3], [0.1, 2.0, 1.0], rtol=1e-6)
    assert not up["kernel"][:, 2].any()


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "qwen3_moe"])
def test_every_projection_is_within_half_a_step(tmp_path, config):
    folder = write_folder(tmp_path, config)
    plain, int8 = ikv.load(folder), ikv.load(folder, quantize="int8")
    quantized = 0
    for path, leaf in jax.tree.leaves_with_path(plain.params):
        *parents, name = (key.key for key in path)
        node = int8.params
        for part in parents:
            node = node[part]
        if "scale" in node and name == "kernel":
            quantized += 1
            step = np.asarray(node["scale"])[..., None, :]
            error = np.abs(np.asarray(node["kernel"]) * step - np.asarray(leaf))
            assert (error <= step * 0.5001).all()
        else:
            np.testing.assert_array_equal(node[name], leaf)
    assert quantized == 2 * 7


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "qwen3_moe"])
def test_logits_stay_close(tmp_path, config):
    tensors = {
        # Spread so that attention and activations are of ordinary size.
        name: array * (array.shape[-1] ** -0.5 if array.ndim > 1 else 0.2) + (array.ndim == 1)
        for name, array in hf_tensors(config).items()
    }
    tensors = {name: array.astype(np.float32) for name, array in tensors.items()}
    folder = write_folder(tmp_path, config, tensors)
    prompt = np.arange(60)[None] + 5, np.array([60]), policies.inertiakv(0.9)
    logits = [
        np.asarray(ikv.prefill(lm.model, lm.params, *prompt)[1])
        for lm in (ikv.load(folder), ikv.load(folder, quantize="int8"))
    ]
    error = (logits[0] - logits[1]).std() / logits[0].std()
    assert 0.0 < error < 0.08  # observed 0.050 and 0.042


def test_a_linear_map_by_hand():
    params = {
        "kernel": jnp.asarray([[1, -2], [3, 127]], jnp.int8),
        "scale": jnp.asarray([0.5, 2.0]),
        "bias": jnp.asarray([1.0, -1.0]),
    }
    for dtype in ("float32", "bfloat16"):
        module = Int8Linear(2, jnp.dtype(dtype), use_bias=True)
        cast = params | {"bias": params["bias"].astype(dtype)}
        out = module.apply({"params": cast}, jnp.asarray([[[2.0, 1.0]]], dtype))
        assert out.dtype == jnp.dtype(dtype)
        # 0.5 (2 + 3) + 1 and 2 (-4 + 127) - 1
        assert out[0, 0].tolist() == [3.5, 245.0]


def test_structure_is_that_of_the_model(tmp_path):
    lm = ikv.load(write_folder(tmp_path, MOE), quantize="int8", dtype="bfloat16")
    own = jax.eval_shape(lm.model.init, jax.random.key(0))
    assert jax.tree.structure(own) == jax.tree.structure(lm.params)
    for ours, theirs in zip(jax.tree.leaves(own), jax.tree.leaves(lm.params), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert lm.model == DecoderModel(lm.config, "bfloat16", "int8")


def test_initial_values_are_spread_as_float_ones():
    module = Int8Linear(64, jnp.dtype("float32"), use_bias=False)
    params = jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 256)))["params"]
    weights = np.asarray(params["kernel"]) * np.asarray(params["scale"])
    assert weights.std() == pytest.approx(256**-0.5, rel=0.02)


def test_weights_that_are_not_finite(tmp_path):
    tensors = hf_tensors(LLAMA)
    tensors[UP][2, 3] = np.inf
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor .*up_proj.* not finite"):
        ikv.load(write_folder(tmp_path, LLAMA, tensors), quantize="int8")


def test_only_int8(tmp_path):
    with pytest.raises(ValueError, match="quantize 'int4' is not supported; supported: None, 'i"):
        ikv.load(tmp_path, quantize="int4")
    with pytest.raises(ValueError, match="quantization 'fp8' is not supported"):
        DecoderModel(config_from_hf(LLAMA), quantization="fp8")
