"""``load`` of folders: values, dtypes, what is missing or too much, and the memory it takes."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights.tiny_files import LLAMA, hf_tensors, safetensors_bytes, write_folder

from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.sharding import make_mesh
from inertiakv_jax.weights.hf_config import config_from_hf
from inertiakv_jax.weights.load import load
from inertiakv_jax.weights.params import aligned_empty, load_params
from inertiakv_jax.weights.safetensors_files import open_safetensors


def at(params, path):
    for part in path.split("/"):
        params = params[part]
    return params


def test_every_tensor_lands_where_the_decoder_looks(tmp_path):
    config = LLAMA | {"tie_word_embeddings": False}
    tensors = hf_tensors(config)
    model = load(write_folder(tmp_path, config, tensors))
    expected = {
        "embed/embedding": tensors["model.embed_tokens.weight"],
        "final_norm/scale": tensors["model.norm.weight"],
        "lm_head/kernel": tensors["lm_head.weight"].T,
    }
    for i in range(2):
        layer, theirs = f"layers_{i}/", f"model.layers.{i}."
        expected |= {
            layer + "input_norm/scale": tensors[theirs + "input_layernorm.weight"],
            layer + "post_attention_norm/scale": tensors[
                theirs + "post_attention_layernorm.weight"
            ],
        }
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"{theirs}self_attn.{part}.weight"
            expected[f"{layer}attention/{part}/kernel"] = tensors[name].T
        for part in ("gate_proj", "up_proj", "down_proj"):
            expected[f"{layer}mlp/{part}/kernel"] = tensors[f"{theirs}mlp.{part}.weight"].T
    for path, array in expected.items():
        leaf = at(model.params, path)
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, array, err_msg=path)
    assert len(jax.tree.leaves(model.params)) == len(expected)


def test_params_have_the_structure_that_the_model_makes_itself(tmp_path):
    model = load(write_folder(tmp_path), dtype="bfloat16")
    own = jax.eval_shape(model.model.init, jax.random.key(0))
    loaded = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.params)
    assert loaded == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), own)


def test_the_rest_of_a_language_model(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    model = load(str(folder))
    assert model.name == str(folder)
    assert model.eos_token_ids == model.config.eos_token_ids == (2, 0)
    assert model.config.num_query_groups == 2
    assert (model.model.num_layers, model.model.num_kv_heads, model.model.head_dim) == (2, 2, 16)
    assert model.tokenizer("a 12<|im_end|>").input_ids[-1] == 2


def test_bfloat16_rounds_to_the_nearest(tmp_path):
    tensors = hf_tensors(LLAMA)
    # 1 + 2^-9 lies below the middle of 1 and the next bfloat16, 1 + 2^-7; 1 + 3 * 2^-8 on the
    # middle of 1 + 2^-7 and 1 + 2^-6, whose last bit is even.
    tensors["model.norm.weight"][:3] = [1 + 2**-9, 1 + 3 * 2**-8, -(2**-140)]
    model = load(write_folder(tmp_path, LLAMA, tensors), dtype="bfloat16")
    scale = model.params["final_norm"]["scale"]
    assert scale.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(scale[:3], np.float32), np.array([1.0, 1 + 2**-6, 0.0], np.float32)
    )
    kernel = model.params["layers_1"]["mlp"]["down_proj"]["kernel"]
    expected = tensors["model.layers.1.mlp.down_proj.weight"].T.astype(jnp.bfloat16)
    np.testing.assert_array_equal(kernel, expected)


def test_tied_checkpoint_with_a_second_copy_of_its_embedding_and_rotary_buffers(tmp_path):
    tensors = hf_tensors(LLAMA)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert "lm_head" not in load(write_folder(tmp_path, LLAMA, tensors)).params


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name_or_path": 5}, "name_or_path must be a name or a path, got 5"),
        ({"name_or_path": None}, "name_or_path must be a name or a path, got None"),
        ({"mesh": "data=1"}, r"mesh must be a Mesh or None, got 'data=1'; write make_mesh\("),
    ],
)
def test_arguments_of_another_kind(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**({"name_or_path": "smollm2-135m"} | arguments))


@pytest.mark.parametrize("text", [None, 2, {"data": 1}])
def test_mesh_that_is_no_text(text):
    with pytest.raises(ValueError, match=r"mesh must be a text like data=4,model=2, got "):
        make_mesh(text)


def test_missing_tensors_are_named(tmp_path):
    tensors = hf_tensors(LLAMA)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"2 tensors are missing: .*1.mlp.up_proj.weight.*norm"):
        load(write_folder(tmp_path, LLAMA, tensors))


def test_a_config_of_a_billion_layers_costs_no_memory(tmp_path):
    config = LLAMA | {"num_hidden_layers": 10**9}
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 10000, got 1000000000"):
        load(write_folder(tmp_path, config, hf_tensors(LLAMA)))


def test_untied_checkpoint_without_a_head(tmp_path):
    with pytest.raises(ValueError, match=r"1 tensors are missing: lm_head\.weight"):
        load(write_folder(tmp_path, LLAMA | {"tie_word_embeddings": False}, hf_tensors(LLAMA)))


def test_extra_tensors_are_named(tmp_path):
    tensors = hf_tensors(LLAMA)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    tensors["model.layers.2.input_layernorm.weight"] = np.ones(32, np.float32)
    with pytest.raises(ValueError, match=r"2 tensors have no place .*q_proj\.bias, .*layers\.2"):
        load(write_folder(tmp_path, LLAMA, tensors))


def test_shape_mismatch_names_both_shapes_before_reading(tmp_path):
    tensors = hf_tensors(LLAMA)
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.ones((64, 32), np.float32)
    with pytest.raises(ValueError, match=r"model\.safetensors.*k_proj.* \(64, 32\).* \(32, 32\)"):
        load(write_folder(tmp_path, LLAMA, tensors))


def test_folder_errors_name_the_folder_and_field(tmp_path):
    folder = write_folder(tmp_path, LLAMA | {"model_type": "gpt_neox"})
    with pytest.raises(ValueError, match=r"'gpt_neox' .*supported: llama, mistral, qwen2"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(folder)


def test_folder_without_a_tokenizer(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer: expected one of tokenizer"):
        load(folder)


def test_only_the_two_dtypes(tmp_path):
    with pytest.raises(
        ValueError, match="'float16' is not supported; supported: float32, bfloat16"
    ):
        load(tmp_path, dtype="float16")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-model", ["'no-such-model' does not exist", "smollm2-135m", "hub id"]),
        ("missing/file.gguf", ["does not exist", ".gguf file"]),
        ("./a/b/c", ["does not exist"]),
    ],
)
def test_nothing_of_that_name(name, words):
    with pytest.raises(ValueError, match="does not exist") as caught:
        load(name)
    for word in words:
        assert word in str(caught.value)


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"is not a \.gguf file"):
        load(path)


def test_revision_needs_a_hub_id(tmp_path):
    with pytest.raises(ValueError, match="revision 'main' needs a hub id"):
        load("smollm2-135m", revision="main")
    with pytest.raises(ValueError, match="revision 'main' needs a hub id"):
        load(write_folder(tmp_path), revision="main")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_host_memory_is_the_result_and_about_one_tensor(tmp_path, dtype):
    config = LLAMA | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024}
    tensors = hf_tensors(config)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    parsed, source = config_from_hf(config), open_safetensors(tmp_path)
    width = jnp.dtype(dtype).itemsize
    result = sum(array.size for array in tensors.values()) * width
    largest = max(array.size for array in tensors.values()) * width
    del tensors
    tracemalloc.start()
    try:
        params = load_params(source, DecoderModel(parsed, dtype))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == result
    # NumPy reports its buffers to tracemalloc. On a CPU jax takes them over, so the result is
    # counted; blocks of 2^16 float32 numbers come on top.
    assert peak < result + largest + 2 * 2**20


def test_buffers_lie_where_jax_takes_them_over():
    array = aligned_empty((3, 5), jnp.dtype("float32"))
    assert array.shape == (3, 5)
    assert array.flags.c_contiguous
    assert array.ctypes.data % 64 == 0
