"""``ModelConfig.from_hf``: what it reads, what it refuses and how it says so."""

import dataclasses

import numpy as np
import pytest
from weights.tiny_files import LLAMA

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.rope_scaling import RopeScaling

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_smollm2_config_json():
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 49152,
        }
    )
    assert config == ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert config.num_query_groups == 3
    # 2 (keys, values) * 30 layers * 3 heads * 64 * 4 bytes
    assert config.kv_bytes_per_token(4) == 46080
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_in_the_form_of_either_transformers(key):
    config = ModelConfig.from_hf(
        without(LLAMA, "rope_theta")
        | {key: LLAMA3_ROPE | {"rope_theta": 500000.0}, "max_position_embeddings": 131072}
    )
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_older_spelling_of_a_linear_rope_type():
    config = ModelConfig.from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling("linear", 4.0)


def test_default_rope_parameters_mean_no_scaling():
    rope = {"rope_type": "default", "rope_theta": 250000.0}
    config = ModelConfig.from_hf(without(LLAMA, "rope_theta") | {"rope_parameters": rope})
    assert (config.rope_theta, config.rope_scaling) == (250000.0, None)


def test_linear_frequencies_by_hand():
    config = dataclasses.replace(
        ModelConfig.from_hf(LLAMA),
        head_dim=4,
        rope_theta=100.0,
        rope_scaling=RopeScaling("linear", 4.0),
    )
    # theta^(-0/4) / 4 and theta^(-2/4) / 4
    np.testing.assert_array_equal(
        config.rope_inverse_frequencies(), np.array([0.25, 0.025], np.float32)
    )


def test_llama3_frequencies_by_hand():
    # Context 2 pi * 100: a frequency f turns 100 f times in it. Three pairs, theta 1000:
    # f = 1 turns 100 times, above high_freq_factor: kept.
    # f = 0.1 turns 10 times, half way from 5 to 15: 1/2 * 0.1 + 1/2 * 0.1 / 8.
    # f = 0.01 turns once, below low_freq_factor: 0.01 / 8.
    scaling = RopeScaling("llama3", 8.0, 5.0, 15.0, 1)
    scaling = dataclasses.replace(scaling, original_max_position_embeddings=628)
    config = dataclasses.replace(
        ModelConfig.from_hf(LLAMA), head_dim=6, rope_theta=1000.0, rope_scaling=scaling
    )
    np.testing.assert_allclose(
        config.rope_inverse_frequencies(), [1.0, 0.05 + 0.00625, 0.00125], rtol=1e-3
    )


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([128001, 128008], None, (128001, 128008)),
        (151645, {"eos_token_id": [151645, 151643]}, (151645, 151643)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, {"temperature": 0.7}, ()),
    ],
)
def test_eos_token_ids_of_both_files(eos, generation, expected):
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": eos}, generation).eos_token_ids == expected


def test_biases_by_family():
    def biases(config):
        config = ModelConfig.from_hf(config)
        return config.attention_bias, config.attention_out_bias, config.mlp_bias

    assert biases(LLAMA) == (False, False, False)
    assert biases(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases(MISTRAL) == (False, False, False)
    assert biases(QWEN2) == (True, False, False)


def test_absent_fields_take_the_defaults_of_the_model_type():
    config = ModelConfig.from_hf(
        without(LLAMA, "num_key_value_heads", "tie_word_embeddings", "rope_theta", "rms_norm_eps")
    )
    assert config.num_kv_heads == 4
    assert not config.tie_word_embeddings
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert ModelConfig.from_hf(without(LLAMA, "head_dim") | {"head_dim": None}).head_dim == 8


def test_mistral_window_as_long_as_the_context_hides_nothing():
    assert ModelConfig.from_hf(MISTRAL | {"sliding_window": 128}).family == "mistral"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma3"}, ["'gemma3'", "llama, mistral, qwen2"]),
        ({"model_type": None}, ["architecture None", "llama, mistral, qwen2"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures", "ForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "'yarn'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", "'dynamic'"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "'longrope'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "None"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 9.0}}, ["low_freq_factor", "9.0"]),
        ({"rope_parameters": {"full_attention": LLAMA3_ROPE}}, ["rope_parameters", "layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["layer_types", "sliding_attention"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads", "4", "3"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"head_dim": None, "hidden_size": 33}, ["hidden_size 33", "num_attention_heads 4"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps", "0.0"]),
        ({"rope_theta": float("nan")}, ["rope_theta", "nan"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"eos_token_id": -1}, ["token ids", "-1"]),
        ({"eos_token_id": 10**20}, ["token ids", "100000000000000000000"]),
        ({"model_type": ["llama"]}, ["architecture ['llama']", "llama, mistral, qwen2"]),
        ({"architectures": 3}, ["architectures must be a list of strings, got 3"]),
        ({"layer_types": [["x"]]}, ["layer_types must be a list of strings, got [['x']]"]),
        ({"rope_theta": 10**400}, ["rope_theta must be a number below"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps must be a number below"]),
        (
            {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": float("inf")}},
            ["rope_scaling.original_max_position_embeddings must be a whole number, got inf"],
        ),
    ],
)
def test_refused_by_name(change, words):
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        ModelConfig.from_hf(LLAMA | change)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (MISTRAL | {"sliding_window": 64}, "sliding_window 64"),
        (MISTRAL | {"sliding_window": "64"}, "sliding_window 64"),
        (without(MISTRAL, "sliding_window") | {"max_position_embeddings": 32768}, "4096"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_enabled_sliding_windows_are_refused(config, field):
    with pytest.raises(ValueError, match=field):
        ModelConfig.from_hf(config)


def test_qwen2_ignores_the_window_that_it_switches_off():
    assert ModelConfig.from_hf(QWEN2 | {"max_position_embeddings": 131072}).family == "qwen2"
