"""Run as a script: what several devices keep and say, against one, case by case as JSON lines.

Each case is a family, a mesh and a policy. All in one process, which starts jax once.
"""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from inertiakv_jax import decode, make_mesh, policies, prefill
from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.partitioning import param_shardings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

LENGTHS = (60, 97, 120, 77, 64, 101, 33, 119)
STEPS = 6
LLAMA = ModelConfig(
    "llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
SMALL = replace(LLAMA, num_layers=1)
CONFIGS = {
    "llama": LLAMA,
    "smollm2": replace(SMALL, num_heads=9, num_kv_heads=3),
    "qwen2": replace(SMALL, family="qwen2", attention_bias=True, num_heads=24, num_kv_heads=12),
    "qwen3": replace(SMALL, family="qwen3", qk_norm=True, num_heads=8, num_kv_heads=8),
    "qwen3-moe": replace(
        SMALL,
        family="qwen3_moe",
        qk_norm=True,
        experts=ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=24),
    ),
    "mistral": replace(LLAMA, family="mistral", sliding_window=32, local_layers=(0,)),
    "gemma2": replace(
        LLAMA,
        family="gemma2",
        sliding_window=32,
        local_layers=(0,),
        attention_soft_cap=50.0,
        logits_soft_cap=30.0,
        post_norms=True,
    ),
    "gemma3": replace(
        LLAMA,
        family="gemma3_text",
        sliding_window=32,
        local_layers=(0,),
        local_rope_theta=1000.0,
        qk_norm=True,
        post_norms=True,
        num_kv_heads=1,
    ),
}


def random_params(model):
    """Weights that make attention far from uniform, so that utilities differ."""
    params = model.init(jax.random.key(3))
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, params)


def run(model, params, policy, mesh):
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, model.config.vocab_size, size=(len(LENGTHS), max(LENGTHS)))
    if mesh is not None:
        params = jax.device_put(params, param_shardings(model, mesh))
    state, logits = prefill(
        model, params, tokens, np.array(LENGTHS), policy, max_new_tokens=STEPS, mesh=mesh
    )
    first = jnp.argmax(logits, axis=-1)
    state, chosen = decode(model, params, state, first, steps=STEPS, policy=policy, mesh=mesh)
    return np.asarray(chosen), np.asarray(state.positions), np.asarray(state.scores)


def main():
    for line in sys.stdin:
        family, text, name = line.split()
        model, mesh = DecoderModel(CONFIGS[family]), make_mesh(text)
        params, policy = random_params(model), policies.by_name(name)
        tokens, positions, scores = run(model, params, policy, None)
        got = run(replace(model, mesh=mesh), params, policy, mesh)
        result = {
            "case": line.strip(),
            "tokens": got[0].tolist() == tokens.tolist(),
            "positions": got[1].tolist() == positions.tolist(),
            "scores": float(np.max(np.abs(got[2] - scores), initial=0.0)),
            "evicted": bool((positions < 0).any()),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
