"""Run as a script: what several devices keep and say, against one, case by case as JSON lines.

A case is a model, a mesh and a policy, a line of standard input: a tiny model of a family, or one
of the catalogue. ``--all`` takes every case of ``all_cases`` instead, or of these all that contain
the words behind it; the exit status is 1 if any differs. Cases of one model share programs.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from inertiakv_jax import decode, generate, load, make_mesh, policies, prefill
from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.learned_scorer import save_learned
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.partitioning import param_shardings
from inertiakv_jax.scoring import LearnedParams

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"

LENGTHS = (60, 97, 120, 77, 64, 101, 33, 119)
STEPS = 6
RATIO = 0.8
PROMPTS = (
    "The history of Rome begins with a village on the Tiber, whose kings gave way to consuls and "
    "tribunes; its legions crossed every sea from Britain to Egypt, building roads and baths",
    "Rivers carry water down steep mountains towards lakes and plains, feeding farms and towns; "
    "fish swim upstream each spring, while herons wait among reeds",
    "For our Sunday soup we need onions, carrots, leeks, garlic, two potatoes, some celery, white "
    "beans, tomatoes, olive oil, thyme, salt, pepper, old bread and hard cheese. First wash what "
    "came out of mud; then cut everything into small pieces, heat your largest pot, let butter "
    "melt, stir until it smells sweet, pour hot broth over them, cover, wait half an hour",
)
"""Of real models: three, to which a mesh adds rows."""
REAL = "smollm2-135m"
LLAMA = ModelConfig(
    "llama",
    vocab_size=512,
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
MESHES = ("data=8", "data=4,model=2", "data=2,model=4", "model=8")
POLICIES = (
    *("inertiakv", "single-step", "cumulative", "lazy4", "score-free"),
    *("vnorm", "entropy", "recency", "random", "learned"),
    *("tova", "h2o", "keydiff", "knorm", "streaming-llm"),
    *("inertiakv,retention=per_layer", "inertiakv,retention=per_head"),
    *("learned,retention=per_head", "entropy,retention=per_layer", "tova,retention=shared"),
    *("snapkv", "adakv-ea", "kvzip", "snapkv+lazy4", "kvzip+inertiakv"),
)


def all_cases() -> Iterator[str]:
    """Every policy on each mesh; every family with five kinds of policies; other axes; SmolLM2."""
    for policy in POLICIES:
        yield from (f"llama {mesh} {policy}" for mesh in MESHES)
        yield f"llama data=2,context=2,model=2 {policy}"
    for family in CONFIGS:
        whole = "kvzip" if CONFIGS[family].sliding_window is None else "adakv-ea"
        for policy in ("inertiakv,retention=per_head", "lazy4", "tova", "snapkv", whole):
            yield from (f"{family} {mesh} {policy}" for mesh in MESHES if family != "llama")
            if policy != "tova":
                yield f"{family} context=4,model=2 {policy}"
    for policy in ("inertiakv", "tova", "kvzip"):
        yield f"qwen3-moe data=2,expert=2,model=2 {policy}"
        yield f"qwen3-moe expert=8 {policy}"
        yield f"qwen3-moe context=2,expert=4 {policy}"
    yield from (f"{REAL} data=4,model=2 {policy}" for policy in POLICIES)
    for policy in ("inertiakv", "lazy4", "tova", "snapkv"):
        yield from (f"{REAL} {mesh} {policy}" for mesh in MESHES if mesh != "data=4,model=2")


def random_params(model):
    """Weights that make attention far from uniform, so that utilities differ."""
    params = model.init(jax.random.key(3))
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, params)


def make_policy(text, config):
    """The policy, with weights or with words for the prompt's repetition if it needs them."""
    options = {}
    if text.startswith("learned"):
        options["scorer_weights"] = scorer_file(config)
    policy = policies.by_name(text, RATIO, **options)
    if text.startswith("kvzip") and config in CONFIGS.values():
        words = {"repeat_first": (7, 11), "repeat_next": (7, 12), "repeat_suffix": (13,)}
        policy = replace(policy, prefill=replace(policy.prefill, **words))
    return policy


@functools.cache
def scorer_file(config):
    path = Path(tempfile.mkdtemp(), "scorer.safetensors")
    rng = np.random.default_rng(5)

    def draw(heads):
        return rng.standard_normal((heads, config.head_dim, 4)).astype(np.float32)

    save_learned(str(path), LearnedParams(draw(config.num_heads), draw(config.num_kv_heads)))
    return str(path)


def run_tiny(name, policy_text, mesh):
    """Chosen tokens of each row, and the state, of random prompts without equal tokens.

    Equal ones have equal keys in the first layer, up to their rotation: norms that tie.
    """
    model = DecoderModel(CONFIGS[name])
    params, policy = random_params(model), make_policy(policy_text, model.config)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(model, mesh))
        model = replace(model, mesh=mesh)
    vocabulary = np.tile(np.arange(model.config.vocab_size), (len(LENGTHS), 1))
    tokens = np.random.default_rng(7).permuted(vocabulary, axis=1)[:, : max(LENGTHS)]
    state, logits = prefill(
        model, params, tokens, np.array(LENGTHS), policy, max_new_tokens=STEPS, mesh=mesh
    )
    first = jnp.argmax(logits, axis=-1)
    state, chosen = decode(model, params, state, first, steps=STEPS, policy=policy, mesh=mesh)
    return chosen.tolist(), state


@functools.lru_cache(maxsize=2)
def loaded(name, mesh):
    return load(name, mesh=mesh)


def run_real(name, policy_text, mesh):
    """Likewise, of texts, each token of them once."""
    lm = loaded(name, mesh)
    policy = make_policy(policy_text, lm.config)
    prompts = [list(dict.fromkeys(lm.tokenizer(text)["input_ids"])) for text in PROMPTS]
    out = generate(lm, prompts, policy=policy, max_new_tokens=20)
    return out.tokens, out.state


@functools.cache
def run(name, policy_text, mesh_text):
    """Tokens, positions and scores of each row; and whether all have lost some of their text."""
    mesh = None if mesh_text is None else make_mesh(mesh_text)
    tokens, state = (run_tiny if name in CONFIGS else run_real)(name, policy_text, mesh)
    batch_axis = 0 if state.valid.ndim == 2 else 1  # [B, S], [E, B, S] or [E, B, K, S]
    held, positions, scores = (
        np.moveaxis(np.asarray(x), batch_axis, 0)[: len(tokens)]
        for x in (state.num_held, state.positions, state.scores)
    )
    seen = np.asarray(state.next_position)[: len(tokens)]
    held = held.reshape(len(tokens), -1).mean(axis=1)  # single heads may keep all (KVzip)
    return tokens, positions, scores, bool((held < seen).all())


def compared(case):
    """What is equal on the case's mesh and on one device."""
    name, mesh, policy = case.split()
    tokens, positions, scores, evicted = run(name, policy, None)
    got = run(name, policy, mesh)
    return {
        "case": case,
        "tokens": got[0] == tokens,
        "positions": got[1].tolist() == positions.tolist(),
        "scores": float(np.abs(got[2] - scores).max() / max(np.abs(scores).max(), 1.0)),
        "evicted": evicted,
    }


def main():
    if sys.argv[1:2] == ["--all"]:
        os.environ.setdefault("XLA_FLAGS", f"{QUICK_TO_COMPILE} {EIGHT_DEVICES}")
        cases = [case for case in all_cases() if all(word in case for word in sys.argv[2:])]
    else:
        cases = [line.strip() for line in sys.stdin]
    different, sharing = 0, None
    for case in cases:
        # Programs take memory, and of thirty layers so many mappings that LLVM gets no more.
        model, _, policy = case.split()
        sharing, before = (model, policy if model == REAL else None), sharing
        if before not in (None, sharing):
            run.cache_clear()
            jax.clear_caches()
        result = compared(case)
        different += not (result["tokens"] and result["positions"] and result["evicted"])
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    if sys.argv[1:]:
        sys.stderr.write(f"{len(cases)} cases, {different} of them differ from one device\n")
        sys.exit(different > 0)


if __name__ == "__main__":
    main()
