"""Targets and loss, against hand-worked numbers and against what a decode step really sees."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.tiny_model import CONFIG, MODEL, params

from inertiakv_jax import policies, prefill
from inertiakv_jax.decode_step import insert_and_attend
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.scoring import LearnedParams
from inertiakv_jax.training.distillation import (
    FEATURES,
    Recorded,
    distillation_loss,
    learned_scores,
    log_mean_attention,
    record,
    untrained,
)


def test_log_mean_attention_by_hand():
    """Head 0 has logits log 3 and 0, so 3/4 and 1/4; head 1 is uniform. The last key is unseen."""
    queries = jnp.asarray([[[[2.0, 0, 0, 0], [0.0, 0, 0, 0]]]])  # times D ** -0.5 = 1/2
    keys = jnp.asarray([[[[math.log(3), 0, 0, 0], [0.0, 0, 0, 0], [9.0, 9, 9, 9]]]])
    got = log_mean_attention(queries, keys, jnp.asarray([[1]]))
    np.testing.assert_allclose(np.exp(got), [[[0.625, 0.375, 0.0]]], rtol=1e-6)


def test_log_mean_attention_does_not_underflow():
    """Logits 0 and -400: a probability of exp(-400) is 0 in float32, its logarithm is not."""
    got = log_mean_attention(
        jnp.asarray([[[[20.0, 0, 0, 0]]]]),
        jnp.asarray([[[[0.0, 0, 0, 0], [-40.0, 0, 0, 0]]]]),
        jnp.asarray([[1]]),
    )
    assert got.tolist() == [[[0.0, -400.0]]]


def test_log_mean_attention_with_a_soft_cap():
    """Capped at 1, the logits tanh(log 3) = 0.8 and 0 differ by 0.8."""
    got = log_mean_attention(
        jnp.asarray([[[[2.0, 0, 0, 0]]]]),
        jnp.asarray([[[[math.log(3), 0, 0, 0], [0.0, 0, 0, 0]]]]),
        jnp.asarray([[1]]),
        soft_cap=1.0,
    )
    assert float(got[0, 0, 0] - got[0, 0, 1]) == pytest.approx(0.8, rel=1e-6)


LAYERED = dataclasses.replace(CONFIG, sliding_window=32, local_layers=(1,), attention_soft_cap=2.0)


@pytest.mark.parametrize(
    ("config", "length"), [(CONFIG, 256), (LAYERED, 128)], ids=["all layers", "window and soft cap"]
)
def test_targets_are_what_a_decode_step_sees(config, length):
    """The last token of a text, read as a whole and as the first token decoded after the rest."""
    model = DecoderModel(config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, size=(2, length)).astype(np.int32)
    weights = LearnedParams(
        *(jnp.asarray(rng.normal(size=(n, 8, 64)), jnp.float32) for n in (4, 2))
    )
    last = np.full((2, 1), length - 1, np.int32)
    recorded = jax.jit(record, static_argnames="model")(model, params(), tokens, last)
    eligible = config.sliding_windows.count(None)
    assert recorded.queries.shape == (eligible, 2, 1, 4, 8)
    assert recorded.keys.shape == (eligible, 2, 2, length, 8)

    policy = policies.inertiakv(0.5)
    lengths = np.full(2, length - 1)
    state, _ = prefill(model, params(), tokens[:, :-1], lengths, policy)
    knobs = dataclasses.replace(policy.knobs(model), learned=weights)

    def decode_one(state, token):
        _, cache, _, _ = insert_and_attend(
            model,
            params(),
            state,
            token,
            knobs,
            policy.ranking,
            rescore=True,
            record=("attention", "learned"),
        )
        return cache.recorded

    # Of each layer: attention, learned; each [devices, B, S] with the token's slot at the end.
    seen = [np.asarray(x).sum(axis=0) for x in jax.jit(decode_one)(state, tokens[:, -1])]
    attention, learned = (np.stack(seen[i::2])[:, :, :length] for i in (0, 1))
    np.testing.assert_allclose(
        np.exp(recorded.log_attention[:, :, 0]), attention, rtol=2e-4, atol=1e-7
    )
    np.testing.assert_allclose(
        learned_scores(weights, recorded)[:, :, 0], learned, rtol=2e-4, atol=2e-4
    )


def test_queries_see_what_stands_before_them():
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 128)).astype(np.int32)
    positions = np.array([[0, 3, 127]], np.int32)
    recorded = jax.jit(record, static_argnames="model")(MODEL, params(), tokens, positions)
    assert recorded.seen.sum(axis=-1).tolist() == [[1, 4, 128]]
    attention = np.exp(np.asarray(recorded.log_attention))
    np.testing.assert_allclose(attention.sum(axis=-1), 1.0, rtol=1e-5)
    assert not attention[:, ~np.asarray(recorded.seen)].any()
    # What follows a query changes nothing of it.
    tokens[:, 4:] = 1
    other = jax.jit(record, static_argnames="model")(MODEL, params(), tokens, positions)
    np.testing.assert_array_equal(
        recorded.log_attention[:, :, :2, :4], other.log_attention[:, :, :2, :4]
    )


def random_recorded(num_heads, num_kv_heads, head_dim, length=6):
    rng = np.random.default_rng(1)
    queries = rng.normal(size=(2, 1, 3, num_heads, head_dim))
    keys = rng.normal(size=(2, 1, num_kv_heads, length, head_dim))
    return Recorded(
        queries=jnp.asarray(queries, jnp.float32),
        keys=jnp.asarray(keys, jnp.float32),
        log_attention=jnp.zeros((2, 1, 3, length)),
        seen=jnp.ones((1, 3, length), bool),
    )


def mean_logit(recorded, group):
    keys = np.repeat(np.asarray(recorded.keys), group, axis=2)
    logits = np.einsum("ebqnd,ebntd->ebqnt", np.asarray(recorded.queries), keys)
    return logits.mean(axis=3) / np.sqrt(keys.shape[-1])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (4, 4, 16)])
def test_untrained_head_is_the_mean_logit(num_heads, num_kv_heads, head_dim):
    """Exactly, where 64 features hold all keys."""
    model = DecoderModel(
        dataclasses.replace(
            CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
    )
    recorded = random_recorded(num_heads, num_kv_heads, head_dim)
    got = learned_scores(untrained(jax.random.key(3), model), recorded)
    expected = mean_logit(recorded, num_heads // num_kv_heads)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_untrained_head_of_wide_keys_is_the_mean_logit_on_average():
    model = DecoderModel(dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=3, head_dim=64))
    recorded = random_recorded(6, 3, 64)
    head = jax.jit(lambda key: learned_scores(untrained(key, model), recorded))
    drawn = np.stack([head(key) for key in jax.random.split(jax.random.key(0), 100)])
    expected = mean_logit(recorded, 2)
    error = np.abs(drawn.mean(axis=0) - expected)
    assert (error < 5 * drawn.std(axis=0) / np.sqrt(100)).all()
    assert untrained(jax.random.key(0), model).query.shape == (6, 64, FEATURES)


def one_query(log_attention, seen):
    length = len(log_attention)
    return Recorded(
        queries=jnp.zeros((1, 1, 1, 1, 2)),
        keys=jnp.zeros((1, 1, 1, length, 2)),
        log_attention=jnp.asarray(log_attention, jnp.float32)[None, None, None],
        seen=jnp.asarray(seen)[None, None],
    )


def test_loss_by_hand():
    """Scores 1 and 3 of attention 3/4 and 1/4; a third token is not seen.

    Less their means, scores are -1 and 1, logarithms a and -a with a = log(3) / 2: errors 1 + a.
    KL: 3/4 log(3/4 / s) + 1/4 log(1/4 / (1 - s)) with s = 1 / (1 + e^2).
    """
    recorded = one_query([math.log(0.75), math.log(0.25), -1e30], [True, True, False])
    scores = jnp.asarray([1.0, 3.0, 77.0])[None, None, None]
    softmax = 1 / (1 + math.e**2)
    kl = 0.75 * math.log(0.75 / softmax) + 0.25 * math.log(0.25 / (1 - softmax))
    expected = (1 + math.log(3) / 2) ** 2 + 0.1 * kl
    assert float(distillation_loss(scores, recorded)) == pytest.approx(expected, rel=1e-6)


def test_logarithm_of_attention_is_the_optimum():
    recorded = one_query([math.log(0.7), math.log(0.2), math.log(0.1), -1e30], [True] * 3 + [False])
    scores = jnp.where(recorded.seen[None], recorded.log_attention + 5.0, 0.0)
    loss, gradient = jax.value_and_grad(distillation_loss)(scores, recorded)
    assert abs(float(loss)) < 1e-6
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)
