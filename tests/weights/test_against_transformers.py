"""Folders that transformers itself saves, its old and its new config form."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights.tiny_files import SIZES, write_tokenizer_json

from inertiakv_jax.weights.load import load

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 3.0}
CASES = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 512}),
    "llama-tied-biases": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"use_sliding_window": False, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "gemma2": ("Gemma2", {}),
}


def saved(folder, case, **options):
    """A random model of transformers, saved with its tokenizer."""
    import transformers

    kind, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(options.pop("dtype", None))
    for parameter in model.parameters():  # norms begin as ones and biases as zeros
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **options)
    write_tokenizer_json(folder)
    return model


def flat(params, prefix=""):
    for name, value in params.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, np.asarray(value)


def as_transformers_says(name, array):
    """Our parameter under transformers' name and in its layout."""
    kernel = name.endswith(".kernel")
    for ours, theirs in {
        "layers_": "model.layers.",
        "embed.embedding": "model.embed_tokens.weight",
        "final_norm.scale": "model.norm.weight",
        "_norm.scale": "_layernorm.weight",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
        "attention.": "self_attn.",
        ".kernel": ".weight",
    }.items():
        name = name.replace(ours, theirs)
    return name, array.T if kernel else array


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_frequencies(tmp_path, case):
    theirs = saved(tmp_path, case)
    ours = load(tmp_path)
    expected = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    got = dict(as_transformers_says(name, array) for name, array in flat(ours.params))
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    frequencies = theirs.model.rotary_emb.inv_freq.numpy()
    # transformers computes the powers in float32; observed: 2.4e-7.
    np.testing.assert_allclose(ours.config.rope_inverse_frequencies(), frequencies, rtol=1e-6)


def test_sharded_checkpoint(tmp_path):
    theirs = saved(tmp_path, "llama2", max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ours = load(tmp_path)
    np.testing.assert_array_equal(
        ours.params["lm_head"]["kernel"], theirs.lm_head.weight.detach().numpy().T
    )
    np.testing.assert_array_equal(
        ours.params["layers_1"]["attention"]["o_proj"]["kernel"],
        theirs.model.layers[1].self_attn.o_proj.weight.detach().numpy().T,
    )


def test_bfloat16_checkpoint_in_both_dtypes(tmp_path):
    theirs = saved(tmp_path, "qwen2", dtype=torch.bfloat16)
    expected = theirs.model.layers[0].mlp.up_proj.weight.detach().float().numpy().T
    for dtype in ("float32", "bfloat16"):
        kernel = load(tmp_path, dtype=dtype).params["layers_0"]["mlp"]["up_proj"]["kernel"]
        assert kernel.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(kernel.astype(jnp.float32), expected)


def test_config_of_transformers_4(tmp_path):
    """The same folder with ``rope_theta`` and ``rope_scaling`` instead of ``rope_parameters``."""
    saved(tmp_path, "llama3")
    new = load(tmp_path).config
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).config == new
    assert new.rope_scaling is not None


def test_sliding_window_that_mistral_has_unless_told_otherwise(tmp_path):
    import transformers

    config = transformers.MistralConfig(**SIZES)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    assert load(tmp_path).model.sliding_windows == (4096, 4096)


def test_gptq_like_config_is_refused(tmp_path):
    saved(tmp_path, "llama2")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config"):
        load(tmp_path)


def test_parameters_are_on_the_default_device(tmp_path):
    saved(tmp_path, "mistral")
    [device] = {leaf.device for leaf in jax.tree.leaves(load(tmp_path).params)}
    assert device == jax.devices()[0]
