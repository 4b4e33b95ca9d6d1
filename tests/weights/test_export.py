"""Folders that are written: read back by ``load`` and by transformers, whole or not at all."""

import json

import jax
import numpy as np
import pytest
from weights.tiny_files import LLAMA, hf_tensors, write_folder, write_gguf

import inertiakv_jax as ikv
from inertiakv_jax.weights.hf_config import config_from_hf
from inertiakv_jax.weights.hf_export import config_to_hf, new_folder, save_safetensors

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LOCAL_GLOBAL = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": LLAMA | {"rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 64},
    "qwen2": LLAMA | {"model_type": "qwen2", "rope_scaling": YARN | {"truncate": False}},
    "qwen2-window": LLAMA
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "qwen3": LLAMA | {"model_type": "qwen3", "eos_token_id": [2, 0]},
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "gemma2": LLAMA | {"model_type": "gemma2", "sliding_window": 64, "layer_types": LOCAL_GLOBAL},
    "gemma3": LLAMA
    | {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": LOCAL_GLOBAL,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 9.0,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_comes_back(name):
    config = config_from_hf(CONFIGS[name])
    written = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(written) == config


@pytest.mark.torch
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_same_out_of_it(tmp_path, name):
    """What we make of its own config.json is the config that was written."""
    transformers = pytest.importorskip("transformers")
    config = config_from_hf(CONFIGS[name])
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "theirs")
    again = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config_from_hf(again) == config


MOE = {key: v for key, v in CONFIGS["qwen3_moe"].items() if key != "mlp_only_layers"}


def saved(tmp_path, config, **options):
    folder = write_folder(tmp_path / "source", config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    lm = ikv.load(folder, dtype=options.pop("dtype", "float32"))
    save_safetensors(lm, tmp_path / "out", **options)
    return lm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_comes_back(tmp_path, dtype):
    lm = saved(tmp_path, LLAMA | {"tie_word_embeddings": False}, dtype=dtype)
    again = ikv.load(tmp_path / "out", dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert (again.config, again.eos_token_ids) == (lm.config, (2, 0))
    text = "a 12 the<|im_end|>"
    assert again.tokenizer(text).input_ids == lm.tokenizer(text).input_ids
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == dtype


def test_files_are_split_by_size(tmp_path):
    lm = saved(tmp_path, MOE, shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    sizes = [(tmp_path / "out" / name).stat().st_size for name in files]
    # The embedding, 300 x 32 float32, has a file of its own.
    assert max(sizes) < 300 * 32 * 4 + 1000
    again = ikv.load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)


def test_gguf_becomes_a_folder_of_the_same_tokens(tmp_path):
    lm = ikv.load(write_gguf(tmp_path / "m.gguf"))
    save_safetensors(lm, tmp_path / "out")
    again = ikv.load(tmp_path / "out")
    assert again.config == lm.config
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    texts = [lm.chat_prompt([{"role": "user", "content": "a 12  the in"}]), "aé\n  7"]
    for text in texts:
        assert again.tokenizer(text).input_ids == lm.tokenizer(text).input_ids
    assert again.chat_prompt([{"role": "user", "content": "x"}]) == "<user>x<assistant>"


@pytest.mark.torch
@pytest.mark.parametrize("config", [MOE, CONFIGS["gemma3"]], ids=["qwen3_moe", "gemma3"])
def test_transformers_loads_it(tmp_path, config):
    torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
    import transformers

    lm = saved(tmp_path, config)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tensors = hf_tensors(config)
    layer = model.model.layers[0]
    np.testing.assert_array_equal(
        layer.self_attn.q_proj.weight.detach(), tensors["model.layers.0.self_attn.q_proj.weight"]
    )
    if lm.config.experts is not None:
        for expert in range(3):
            theirs = layer.mlp.experts.down_proj[expert].detach()
            key = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
            np.testing.assert_array_equal(theirs, tensors[key])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a 12 the").input_ids == lm.tokenizer("a 12 the").input_ids


def test_int8_is_refused_before_anything_is_written(tmp_path):
    lm = ikv.load(write_folder(tmp_path / "source"), quantize="int8")
    with pytest.raises(ValueError, match="int8 parameters cannot be saved as safetensors"):
        save_safetensors(lm, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_is_overwritten_and_nothing_half_written_is_left(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with new_folder(target) as made:  # an empty folder may be filled
        (made / "a").write_text("1")
    assert (target / "a").read_text() == "1"
    with (
        pytest.raises(ValueError, match="out exists and is not an empty folder"),
        new_folder(target),
    ):
        pass
    with pytest.raises(KeyError), new_folder(tmp_path / "deep" / "new") as made:  # noqa: PT012
        (made / "a").write_text("1")
        raise KeyError
    assert list((tmp_path / "deep").iterdir()) == []
    assert (target / "a").read_text() == "1"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file exists"), new_folder(tmp_path / "file"):
        pass
