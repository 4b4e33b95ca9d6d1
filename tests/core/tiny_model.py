"""A tiny random model and ragged prompts, shared by tests so that they share compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from oracle import llama
from oracle.tiny import random_params

from inertiakv_jax import decode, policies, prefill, step
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.decoder import DecoderModel

CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
)
MODEL = DecoderModel(CONFIG)
LENGTHS = (60, 134, 170)  # budgets at ratio 0.9: 6, 13, 17
STEPS = 6
POLICIES = {
    "full": policies.full(),
    "inertiakv": policies.inertiakv(0.9),
    "lazy4": policies.lazy(4, 0.9),
    "score-free": policies.score_free(0.9),
}
EVICTING = {name: policy for name, policy in POLICIES.items() if policy.evicts}


@functools.cache
def params():
    """Weights that make attention far from uniform, so that utilities differ."""
    return jax.tree.map(jnp.asarray, llama.cast(random_params(CONFIG, seed=5), np.float32))


def prompts(lengths=LENGTHS, seed=7):
    """One random prompt of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, size=length) for length in lengths]


def padded(rows, width=None):
    """[B, T] tokens and [B] lengths; what stands in the padding is a token like any other."""
    tokens = np.full((len(rows), width or max(map(len, rows))), 13)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(row) for row in rows])


def prefilled(policy, rows=None, *, max_new_tokens=20, model=MODEL, weights=None):
    """State after prefill, and each row's most likely next token."""
    tokens, lengths = padded(prompts() if rows is None else rows)
    weights = params() if weights is None else weights
    state, logits = prefill(model, weights, tokens, lengths, policy, max_new_tokens=max_new_tokens)
    return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def decoded(state, token, policy, steps=STEPS, **options):
    """``decode`` with the tiny model: state, and tokens [B, steps] as NumPy."""
    state, tokens = decode(MODEL, params(), state, token, steps=steps, policy=policy, **options)
    return state, np.asarray(tokens)


_step = jax.jit(step, static_argnames=("model", "policy"))


def stepped(state, token, policy):
    """``step`` with the tiny model: state, and logits [B, V] as NumPy."""
    state, logits = _step(MODEL, params(), state, token, policy)
    return state, np.asarray(logits)


def held_positions(state):
    """The set of positions that each row holds."""
    rows = []
    for valid, positions in zip(np.asarray(state.valid), np.asarray(state.positions), strict=True):
        held = positions[valid].tolist()
        assert len(held) == len(set(held)), "a position is held twice"
        rows.append(set(held))
    return rows


def utilities(state):
    """Each row's utilities by position."""
    arrays = (np.asarray(x) for x in (state.valid, state.positions, state.scores))
    return [
        dict(zip(positions[valid].tolist(), scores[valid].tolist(), strict=True))
        for valid, positions, scores in zip(*arrays, strict=True)
    ]


def assert_identical(first, second):
    """Two trees equal in structure, dtype and every bit."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    pairs = zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True)
    for (path, one), other in pairs:
        name = jax.tree_util.keystr(path)
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert one.tobytes() == other.tobytes(), name
