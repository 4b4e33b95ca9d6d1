"""Tiny random models that transformers saves, loaded and run here: logits and greedy tokens."""

import numpy as np
import pytest
from weights.tiny_files import SIZES, write_tokenizer_json

import inertiakv_jax as ikv
from inertiakv_jax import policies

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
transformers = pytest.importorskip("transformers")

NEW_TOKENS = 32
LOGITS_TOLERANCE = 1e-4  # absolute, of logits up to 5; observed 1.1e-5
HALF_TOLERANCE = 0.3  # of bfloat16, where both sides are off; observed 0.12
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
}


def saved(folder, case, dtype=torch.float32):
    """A random model whose attention is far from uniform, saved with a tokenizer."""
    kind, changes = CASES[case]
    torch.manual_seed(1)
    options = {**SIZES, "max_position_embeddings": 512, "eos_token_id": None, **changes}
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**options)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                fan_in = parameter.shape[-1] if parameter.ndim == 2 else 1
                parameter.normal_(std=1.5 * fan_in**-0.5)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    write_tokenizer_json(folder)
    return model


def prompt(length=100):
    return np.random.default_rng(2).integers(3, SIZES["vocab_size"], size=length)


def last_logits(lm, tokens):
    lengths = np.array([len(tokens)])
    policy = policies.inertiakv(0.9)
    _, logits = ikv.prefill(lm.model, lm.params, tokens[None], lengths, policy)
    return np.asarray(logits[0])


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0, -1].float().numpy()


def their_greedy(model, tokens, count):
    ids = torch.from_numpy(tokens)[None]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(tmp_path, case):
    theirs, tokens = saved(tmp_path, case), prompt()
    lm = ikv.load(tmp_path)
    expected = their_logits(theirs, tokens)
    np.testing.assert_allclose(last_logits(lm, tokens), expected, atol=LOGITS_TOLERANCE)
    out = ikv.generate(lm, [tokens], policy="full", max_new_tokens=NEW_TOKENS, stop_at_eos=False)
    assert out.tokens == [their_greedy(theirs, tokens, NEW_TOKENS)]


@pytest.mark.parametrize("case", ["llama3", "qwen2-untied"])
def test_bfloat16(tmp_path, case):
    theirs, tokens = saved(tmp_path, case, torch.bfloat16), prompt()
    lm = ikv.load(tmp_path, dtype="bfloat16")
    got = last_logits(lm, tokens)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, their_logits(theirs, tokens), atol=HALF_TOLERANCE)
