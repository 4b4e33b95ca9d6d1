"""Tiny random models that transformers saves, loaded and run here: logits and greedy tokens."""

import numpy as np
import pytest
from weights.tiny_files import SIZES, write_tokenizer_json

import inertiakv_jax as ikv
from inertiakv_jax import policies

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
transformers = pytest.importorskip("transformers")

LENGTHS = (100, 37, 64)  # of one batch
NEW_TOKENS = 25  # the prefill's and 24 decode steps'
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
GEMMA3 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
CASES = {
    "llama": ("Llama", {}),
    "llama3-biases-tied": (
        "Llama",
        {
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn-window": (
        "Qwen2",
        {
            "tie_word_embeddings": False,
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-moe": ("Qwen3Moe", MOE | {"mlp_only_layers": [1]}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-biases-untied": (
        "Gemma3",
        GEMMA3
        | {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 4.0,
            "rope_parameters": None,
        },
    ),
}


def saved(folder, case, dtype=torch.float32):
    """A random model whose attention is far from uniform, saved with a tokenizer."""
    kind, changes = CASES[case]
    torch.manual_seed(1)
    options = {**SIZES, "max_position_embeddings": 512, "eos_token_id": None, **changes}
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**options, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))  # to where it begins, 0 or 1
            else:
                fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
                parameter.normal_(std=1.5 * fan_in**-0.5)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    write_tokenizer_json(folder)
    return model


def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(3, SIZES["vocab_size"], size=length) for length in LENGTHS]


def prefilled(lm, rows):
    tokens = np.zeros((len(rows), max(map(len, rows))), int)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return ikv.prefill(
        lm.model, lm.params, tokens, lengths, policies.full(), max_new_tokens=NEW_TOKENS
    )


def theirs_of(model, rows):
    """Logits [B, V] behind the prompts, and greedy tokens [B, NEW_TOKENS], of the padded batch."""
    longest = max(map(len, rows))
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):  # padded on the left there
        ids[row, longest - len(tokens) :] = torch.from_numpy(tokens)
        mask[row, longest - len(tokens) :] = 1
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.logits[0].float().numpy(), out.sequences[:, longest:].tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(tmp_path, case):
    theirs, rows = saved(tmp_path, case), prompts()
    lm = ikv.load(tmp_path)
    state, logits = prefilled(lm, rows)
    expected, expected_tokens = theirs_of(theirs, rows)
    np.testing.assert_allclose(logits, expected, atol=LOGITS_TOLERANCE)
    first = logits.argmax(axis=-1)
    _, tokens = ikv.decode(
        lm.model, lm.params, state, first, steps=NEW_TOKENS - 1, policy=policies.full()
    )
    answers = np.concatenate([first[:, None], tokens], axis=1).tolist()
    assert answers == expected_tokens


def test_text_of_a_multimodal_model(tmp_path):
    """Gemma 3 of 4B and more is published with a vision tower, which is left unread."""
    text = {**SIZES, **GEMMA3, "max_position_embeddings": 512}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    ids = {"boi_token_index": 10, "eoi_token_index": 11, "image_token_index": 12}
    torch.manual_seed(1)
    config = transformers.Gemma3Config(text, vision, mm_tokens_per_image=4, **ids)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    lm = ikv.load(tmp_path)
    assert (lm.config.family, lm.config.eos_token_ids) == ("gemma3_text", (1,))
    row = np.arange(13, 70)
    with torch.no_grad():
        expected = whole(torch.from_numpy(row)[None]).logits[:, -1].numpy()
    np.testing.assert_allclose(prefilled(lm, [row])[1], expected, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
def test_bfloat16(tmp_path, case):
    theirs, rows = saved(tmp_path, case, torch.bfloat16), prompts()
    lm = ikv.load(tmp_path, dtype="bfloat16")
    got = np.asarray(prefilled(lm, rows)[1])
    assert np.isfinite(got).all()
    expected, _ = theirs_of(theirs, rows)
    np.testing.assert_allclose(got, expected, atol=HALF_TOLERANCE)
