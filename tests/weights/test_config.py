"""``ModelConfig.from_hf``: what it reads, what it refuses and how it says so."""

import dataclasses

import numpy as np
import pytest
from weights.tiny_files import LLAMA

from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.rope_scaling import RopeScaling
from inertiakv_jax.weights.hf_config import config_from_hf

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 6283,
    "beta_fast": 50.0,
    "beta_slow": 2.0,
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
    config = config_from_hf(
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
    config = config_from_hf(
        without(LLAMA, "rope_theta")
        | {key: LLAMA3_ROPE | {"rope_theta": 500000.0}, "max_position_embeddings": 131072}
    )
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_older_spelling_of_a_linear_rope_type():
    config = config_from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling("linear", 4.0)


def test_default_rope_parameters_mean_no_scaling():
    rope = {"rope_type": "default", "rope_theta": 250000.0}
    config = config_from_hf(without(LLAMA, "rope_theta") | {"rope_parameters": rope})
    assert (config.rope_theta, config.rope_scaling) == (250000.0, None)


def test_linear_frequencies_by_hand():
    config = dataclasses.replace(
        config_from_hf(LLAMA),
        head_dim=4,
        rope_theta=100.0,
        rope_scaling=RopeScaling("linear", 4.0),
    )
    # theta^(-0/4) / 4 and theta^(-2/4) / 4
    np.testing.assert_array_equal(
        config.rope_inverse_frequencies(), np.array([0.25, 0.025], np.float32)
    )


def test_yarn_frequencies_by_hand():
    # Context 2 pi * 1000, D 8, theta 10^4: pair i turns 1000 / 10^i times in it. 50 times turns
    # "pair" log10(1000 / 50) = 1.3, rounded down to 1; twice "pair" 2.7, rounded up to 3.
    # Pairs 0 and 1 are kept, pair 2 is half way, pair 3 is divided by 4.
    config = dataclasses.replace(
        config_from_hf(LLAMA | {"rope_scaling": YARN}), head_dim=8, rope_theta=10_000.0
    )
    expected = [1.0, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.001 / 4]
    np.testing.assert_allclose(config.rope_inverse_frequencies(), expected, rtol=1e-6)
    # 0.1 ln 4 + 1
    assert config.rope_scaling.attention_factor == pytest.approx(1.1386294)
    # A context of 6283 tokens, four times as long.
    assert config.max_position_embeddings == 25132


def test_yarn_ramp_between_fractions_of_pairs():
    scaling = RopeScaling(
        "yarn",
        4.0,
        original_max_position_embeddings=6283,
        beta_fast=50.0,
        beta_slow=2.0,
        truncate=False,
    )
    config = dataclasses.replace(
        config_from_hf(LLAMA), head_dim=8, rope_theta=10_000.0, rope_scaling=scaling
    )
    # The ramp goes from 1.30103 to 2.69897; pair 2 is half way again, pair 1 is before it.
    expected = [1.0, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.001 / 4]
    np.testing.assert_allclose(config.rope_inverse_frequencies(), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        # (0.1 * 0.5 ln 4 + 1) / (0.1 * 2 ln 4 + 1)
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, 0.8371950),
        ({"mscale": 0.5}, 1.1386294),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(change, expected):
    config = config_from_hf(LLAMA | {"rope_scaling": YARN | change})
    assert config.rope_scaling.attention_factor == pytest.approx(expected, rel=1e-6)


def test_yarn_with_nothing_but_a_factor_extends_the_context_of_the_config():
    yarn = {"type": "yarn", "factor": 4.0}
    config = config_from_hf(LLAMA | {"rope_scaling": yarn})
    assert config.rope_scaling.original_max_position_embeddings == 128
    assert (config.rope_scaling.beta_fast, config.rope_scaling.beta_slow) == (32.0, 1.0)
    assert config.max_position_embeddings == 512
    # A config that states the extended length already keeps it.
    stated = LLAMA | {"rope_scaling": yarn | {"original_max_position_embeddings": 32}}
    assert config_from_hf(stated).max_position_embeddings == 128


def test_a_field_that_is_not_known_is_named():
    with pytest.warns(UserWarning, match=r"no effect here: embedding_multiplier, use_magic \("):
        config_from_hf(LLAMA | {"use_magic": 3, "embedding_multiplier": 12.0, "pad_token_id": 0})


def test_qwen3_has_normed_heads_of_their_own_width():
    config = config_from_hf(without(QWEN2, "head_dim") | {"model_type": "qwen3"})
    assert (config.head_dim, config.qk_norm, config.attention_bias) == (128, True, False)
    biased = config_from_hf(QWEN2 | {"model_type": "qwen3", "attention_bias": True})
    assert (biased.head_dim, biased.attention_bias, biased.attention_out_bias) == (16, True, True)


def test_llama3_frequencies_by_hand():
    # Context 2 pi * 100: a frequency f turns 100 f times in it. Three pairs, theta 1000:
    # f = 1 turns 100 times, above high_freq_factor: kept.
    # f = 0.1 turns 10 times, half way from 5 to 15: 1/2 * 0.1 + 1/2 * 0.1 / 8.
    # f = 0.01 turns once, below low_freq_factor: 0.01 / 8.
    scaling = RopeScaling("llama3", 8.0, 5.0, 15.0, 1)
    scaling = dataclasses.replace(scaling, original_max_position_embeddings=628)
    config = dataclasses.replace(
        config_from_hf(LLAMA), head_dim=6, rope_theta=1000.0, rope_scaling=scaling
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
    assert config_from_hf(LLAMA | {"eos_token_id": eos}, generation).eos_token_ids == expected


def test_biases_by_family():
    def biases(config):
        config = config_from_hf(config)
        return config.attention_bias, config.attention_out_bias, config.mlp_bias

    assert biases(LLAMA) == (False, False, False)
    assert biases(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases(MISTRAL) == (False, False, False)
    assert biases(QWEN2) == (True, False, False)


def test_absent_fields_take_the_defaults_of_the_model_type():
    config = config_from_hf(
        without(LLAMA, "num_key_value_heads", "tie_word_embeddings", "rope_theta", "rms_norm_eps")
    )
    assert config.num_kv_heads == 4
    assert not config.tie_word_embeddings
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert config_from_hf(without(LLAMA, "head_dim") | {"head_dim": None}).head_dim == 8


def test_mistral_window_as_long_as_the_context_hides_nothing():
    assert config_from_hf(MISTRAL | {"sliding_window": 128}).family == "mistral"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma"}, ["'gemma'", "llama, mistral, qwen2", "gemma3_text, gemma3"]),
        ({"model_type": None}, ["architecture None", "llama, mistral, qwen2"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures", "ForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.factor", "None"]),
        ({"rope_scaling": YARN | {"beta_slow": 60.0}}, ["beta_slow", "60.0", "50.0"]),
        ({"rope_scaling": YARN | {"attention_factor": -1.0}}, ["attention_factor", "-1.0"]),
        ({"rope_scaling": YARN | {"truncate": "no"}}, ["rope_scaling.truncate", "'no'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", "'dynamic'"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "'longrope'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "None"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 9.0}}, ["low_freq_factor", "9.0"]),
        ({"rope_parameters": {"full_attention": LLAMA3_ROPE}}, ["rope_parameters", "layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 layers", "got 1"]),
        ({"layer_types": ["chunked_attention"] * 2}, ["layer_types", "chunked_attention"]),
        ({"sliding_window": 64}, ["sliding_window 64"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads", "4", "3"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"head_dim": None, "hidden_size": 33}, ["hidden_size 33", "num_attention_heads 4"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps", "0.0"]),
        ({"rope_theta": float("nan")}, ["rope_theta", "nan"]),
        ({"rope_theta": 1.0}, ["rope_theta", "above 1", "1.0"]),
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
        config_from_hf(LLAMA | change)
    for word in words:
        assert word in str(caught.value)


def test_mistral_has_a_window_in_every_layer_unless_told_otherwise():
    assert config_from_hf(MISTRAL).sliding_windows == (None, None)
    assert config_from_hf(MISTRAL | {"sliding_window": 64}).sliding_windows == (64, 64)
    long = without(MISTRAL, "sliding_window") | {"max_position_embeddings": 32768}
    config = config_from_hf(long)
    assert config.sliding_windows == (4096, 4096)
    # Nothing grows; two layers hold 4096 tokens of 2 (keys, values) * 2 heads * 16 numbers each.
    assert (config.kv_bytes_per_token(2), config.window_kv_bytes(2)) == (0, 1_048_576)


def test_qwen2_has_windows_in_its_upper_layers():
    on = QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
    assert config_from_hf(on).sliding_windows == (None,) * 4
    upper = config_from_hf(on | {"max_window_layers": 3})
    assert upper.sliding_windows == (None, None, None, 64)
    listed = on | {"layer_types": ["sliding_attention", *["full_attention"] * 3]}
    assert config_from_hf(listed).sliding_windows == (64, None, None, None)


GEMMA2 = LLAMA | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 12,
    "sliding_window": 64,
}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def test_gemma3_of_transformers_4():
    """The fields of gemma-3-1b's own config.json that matter."""
    config = config_from_hf(
        GEMMA3
        | {
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 168,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        }
    )
    assert config.sliding_windows == (*[64] * 5, None) * 2
    assert (config.rope_theta, config.rope_scaling) == (1e6, RopeScaling("linear", 8.0))
    assert (config.local_rope_theta, config.query_scale_dim) == (1e4, 168.0)
    assert (config.attention_soft_cap, config.logits_soft_cap) == (None, None)
    assert (config.qk_norm, config.post_norms, config.unit_offset_norms) == (True, True, True)
    assert (config.activation, config.scale_embeddings) == ("gelu_tanh", True)
    global_, local = config.rope_inverse_frequencies(), config.local_rope_inverse_frequencies()
    # Pair 1 of 8: theta^(-1/8), the global one divided by 8.
    np.testing.assert_allclose((global_[1], local[1]), (0.17782794 / 8, 0.31622777), rtol=1e-6)


def test_gemma3_of_transformers_5_says_the_same():
    old = GEMMA3 | {
        "rope_theta": 500000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    new = without(GEMMA3, "rope_theta") | {
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    }
    assert config_from_hf(old) == config_from_hf(new)


def test_defaults_of_gemma():
    absent = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    config = config_from_hf(without(GEMMA3, *absent, "tie_word_embeddings", "eos_token_id"))
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.tie_word_embeddings) == (256, True)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert (config.query_scale_dim, config.eos_token_ids) == (256.0, (1,))


def test_gemma2_caps_its_logits():
    config = config_from_hf(GEMMA2)
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert config.sliding_windows == (64, None) * 6
    assert (config.qk_norm, config.local_rope_theta) == (False, None)
    assert config_from_hf(GEMMA2 | {"final_logit_softcapping": None}).logits_soft_cap is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MISTRAL | {"sliding_window": "64"}, "sliding_window must be an integer .* '64'"),
        (
            MISTRAL | {"layer_types": ["sliding_attention"] * 2},
            "layer_types .* needs a sliding_win",
        ),
        (GEMMA3 | {"sliding_window": None}, "sliding_window must be an integer .* None"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation 'gelu' .* gelu_pytorch_tanh"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA3 | {"final_logit_softcapping": -1.0}, "logits_soft_cap must be .* above 0"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_scale_dim must be .* above 0"),
        (
            GEMMA3 | {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters must have entries",
        ),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": LLAMA3_ROPE}},
            "sliding_attention.rope_type 'llama3'",
        ),
        (GEMMA2 | {"rope_scaling": {"full_attention": LLAMA3_ROPE}}, "rope_scaling .* layer type"),
    ],
)
def test_windows_and_caps_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        config_from_hf(config)


def test_qwen2_ignores_the_window_that_it_switches_off():
    assert config_from_hf(QWEN2 | {"max_position_embeddings": 131072}).family == "qwen2"


QWEN3_MOE = QWEN2 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
}


def test_qwen3_moe():
    config = config_from_hf(QWEN3_MOE | {"decoder_sparse_step": 1, "mlp_only_layers": []})
    assert config.experts == ExpertsConfig(8, 2, 24, normalize_weights=True)
    assert config.qk_norm
    assert all(config.has_experts(layer) for layer in range(4))
    other = config_from_hf(
        without(QWEN3_MOE, "num_experts", "norm_topk_prob")
        | {"num_local_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    )
    assert other.experts == ExpertsConfig(6, 2, 24, normalize_weights=False, dense_layers=(0, 1, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_per_token must be at most num_experts, got 9 and 8"),
        ({"num_experts": "8"}, "num_experts must be an integer"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers must be a list of integers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"mlp_bias": True}, "mlp_bias True is not supported for model_type 'qwen3_moe'"),
    ],
)
def test_mixtures_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        config_from_hf(QWEN3_MOE | change)
