"""A tiny random model for tests: its config and its parameter tree, in float64."""

import math
from types import SimpleNamespace

import numpy as np


def tiny_config(**changes):
    """The fields of ``ModelConfig`` that the NumPy model reads."""
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    return SimpleNamespace(**(fields | changes))


def random_params(config, seed, *, bias=False, tied=False):
    """The library's parameter tree, with weights large enough for attention far from uniform."""
    rng = np.random.default_rng(seed)

    def kernel(inputs, outputs, biased=False):
        p = {"kernel": rng.normal(size=(inputs, outputs)) * 1.5 / math.sqrt(inputs)}
        if biased:
            p["bias"] = rng.normal(size=outputs)
        return p

    def scale():
        return {"scale": 1 + 0.2 * rng.normal(size=config.hidden_size)}

    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    params = {
        "embed": {"embedding": rng.normal(size=(config.vocab_size, hidden))},
        "final_norm": scale(),
    }
    if not tied:
        params["lm_head"] = kernel(hidden, config.vocab_size)
    for layer in range(config.num_layers):
        params[f"layers_{layer}"] = {
            "input_norm": scale(),
            "post_attention_norm": scale(),
            "attention": {
                "q_proj": kernel(hidden, queries, bias),
                "k_proj": kernel(hidden, keys, bias),
                "v_proj": kernel(hidden, keys, bias),
                "o_proj": kernel(queries, hidden),
            },
            "mlp": {
                "gate_proj": kernel(hidden, inner),
                "up_proj": kernel(hidden, inner),
                "down_proj": kernel(inner, hidden),
            },
        }
    return params
