"""The NumPy model of the method against hand-worked literals, and against transformers."""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from oracle import llama, method
from oracle.tiny import random_params, tiny_config

INFINITE = float("inf")


def two_number_model(query):
    """One layer, one head, D = H = 2, whose only token gives q = ``query``, k = (0, 1), v = (0, 0).

    One rotation of speed 1: at query position p, key position i, the logit is
    q . R(i - p) (0, 1) / sqrt(2); for q = (1, 0) that is sin(p - i) / sqrt(2).
    """
    config = tiny_config(
        vocab_size=1, hidden_size=2, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2
    )
    config.rms_norm_eps = 0.0
    none = {"kernel": np.zeros((2, 2))}
    one = {"scale": np.ones(2)}
    params = {
        "embed": {"embedding": np.ones((1, 2))},
        "final_norm": one,
        "layers_0": {
            "input_norm": one,
            "post_attention_norm": one,
            "attention": {
                "q_proj": {"kernel": np.diag(query)},
                "k_proj": {"kernel": np.diag([0.0, 1.0])},
                "v_proj": none,
                "o_proj": none,
            },
            "mlp": {"gate_proj": none, "up_proj": none, "down_proj": none},
        },
    }
    return params, config


# --- the pieces -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "length", "expected"),
    [
        (0.9, 10, 1),
        (0.8, 5, 1),
        (0.9, 100, 10),
        (0.8, 100, 20),
        (0.9, 1000, 100),
        (0.99, 100, 1),
        (0.8, 4095, 819),
        (0.6, 2, 1),
        (0.5, 7, 3),
        (0.97, 100, 3),
        (1e-05, 100, 99),
        (0.9, 1, 1),
        (0.4, 3, 1),
        (0.4, 5, 3),
        (0.9, 64_029, 6_402),
    ],
)
def test_budget_is_exact(ratio, length, expected):
    assert method.budget_tokens(ratio, length) == expected


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_ratio_out_of_range_raises(ratio):
    with pytest.raises(ValueError, match="ratio: expected 0 <= ratio < 1"):
        method.budget_tokens(ratio, 10)


@pytest.mark.parametrize(
    ("refresh", "expected"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (2, [1, 3, 5, 7, 9]),
        (4, [1, 5, 9]),
        (8, [1, 9]),
        (0, [1]),
    ],
)
def test_refresh_steps(refresh, expected):
    assert [t for t in range(1, 11) if method.is_refresh_step(t, refresh)] == expected


def test_prior_is_the_mean_of_the_held_tokens():
    assert method.prior_utility({0: 0.1, 5: 0.2, 9: 0.6}) == pytest.approx(0.3, rel=1e-12)


def test_score_is_the_mean_over_query_heads():
    heads = np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.1, 0.2, 0.7]])
    scores = method.layer_scores(heads, [3, 4, 9])
    assert scores == pytest.approx({3: 0.3, 4: 0.275, 9: 0.425}, rel=1e-12)


def test_moving_average_over_one_layer():
    m = method.aggregate({0: 0.5, 1: 0.1}, [{0: 0.0, 1: 1.0}], 0.8)
    assert m == pytest.approx({0: 0.4, 1: 0.28}, rel=1e-12)


def test_moving_average_runs_through_the_layers_in_order():
    # alpha 1/2: 1 -> (1 + 0) / 2 -> (1/2 + 1) / 2 -> (3/4 + 0) / 2
    m = method.aggregate({7: 1.0}, [{7: 0.0}, {7: 1.0}, {7: 0.0}], 0.5)
    assert m == {7: 0.375}
    # alpha 0 keeps the last layer alone
    assert method.aggregate({7: 1.0}, [{7: 0.25}, {7: 0.75}], 0.0) == {7: 0.75}


@pytest.mark.parametrize(
    ("utilities", "budget", "first", "recent", "expected"),
    [
        ({0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}, 2, 0, 0, [0, 1]),  # tie: lower position first
        ({3: 0.1, 5: 0.2, 9: 0.1}, 2, 0, 0, [3]),
        ({3: 0.1, 5: 0.2, 9: 0.0}, 2, 0, 0, [9]),  # the new token may go in its own step
        ({3: 0.3, 5: 0.2, 9: 0.1}, 1, 0, 0, [9, 5]),
        ({3: 0.3, 5: 0.2, 9: 0.1}, 3, 0, 0, []),
        ({3: 0.3, 5: 0.2, 9: 0.1}, INFINITE, 0, 0, []),
        ({0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}, 2, 0, 1, [0, 1]),
        ({0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}, 2, 1, 0, [1, 2]),
        ({0: 0.5, 1: 0.5, 2: 0.5, 3: -5.0}, 2, 0, 1, [0, 1]),  # protected by mask, not by score
        ({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}, 2, 1, 1, [1, 2]),
        ({0: -1.0, 4: 0.5, 6: 0.4, 8: 0.3, 9: 0.0}, 3, 1, 2, [6, 4]),
        ({2: 0.1, 4: 0.5, 9: 0.3}, 2, 2, 0, [2]),  # "first" counts positions, not tokens held
        ({2: 0.3, 4: 0.1, 9: 0.2}, 2, 0, 5, [4]),  # latest 5 of position 9 are 5 to 9
    ],
)
def test_eviction_order(utilities, budget, first, recent, expected):
    assert method.choose_evicted(utilities, budget, first, recent)[0] == expected


def test_margin_is_the_relative_gap_at_the_cut():
    assert method.choose_evicted({0: 0.3, 1: 0.2, 2: 0.4}, 2)[1] == pytest.approx(1 / 3)
    assert method.choose_evicted({0: 0.3, 1: 0.2, 2: 0.2}, 2)[1] == 0
    assert method.choose_evicted({0: 0.3, 1: 0.2}, 2)[1] == INFINITE


# --- whole runs, worked by hand -------------------------------------------------------------------


def test_run_with_uniform_attention():
    params, config = two_number_model(query=[0.0, 0.0])
    records = method.run(params, config, [0] * 4, steps=3, budget=2)
    # m: 0.2 / 5 for all; then 0.8 m + 0.2 / 3, the new token starting at the mean
    expected = [1 / 25, 0.8 / 25 + 0.2 / 3, 0.64 / 25 + 0.16 / 3 + 0.2 / 3]
    assert [r.kept for r in records] == [{0, 1, 2, 3}, {3, 4}, {4, 5}, {5, 6}]
    assert [r.evicted for r in records] == [[], [0, 1, 2], [3], [4]]
    for record, value in zip(records[1:], expected, strict=True):
        assert list(record.utilities.values()) == pytest.approx([value] * len(record.utilities))
    assert [r.prior for r in records] == pytest.approx([0, 0, *expected[:2]])


# exp(sin(d) / sqrt(2)) for d = 0, 1, 2, 3, 4: 1, 1.813050, 1.902123, 1.104936, 0.585585
STEP_1 = [0.091417, 0.172493, 0.296943, 0.283036, 0.156111]  # positions 0 to 4, sum 6.405694
STEP_2 = [0.275748, 0.474693, 0.249560]  # positions 2, 3, 5, sum 4.007059


@pytest.mark.parametrize(
    ("refresh", "second", "dropped"),
    [
        # 0.8 * 0.2 * p1 + 0.2 * p2; the new token's p1 is the mean 0.289990 of positions 2 and 3
        (1, {2: 0.102661, 3: 0.140224, 5: 0.096310}, 5),
        (0, {2: 0.059389, 3: 0.056607, 5: 0.057998}, 3),
        (2, {2: 0.059389, 3: 0.056607, 5: 0.057998}, 3),
    ],
)
def test_run_with_rotating_attention(refresh, second, dropped):
    params, config = two_number_model(query=[1.0, 0.0])
    records = method.run(params, config, [0] * 4, steps=2, budget=2, refresh=refresh)
    _, one, two = records
    assert one.scores is not None
    assert list(one.scores[0].values()) == pytest.approx(STEP_1, abs=2e-6)
    assert one.utilities == pytest.approx({i: 0.2 * p for i, p in enumerate(STEP_1)}, abs=1e-6)
    assert (one.prior, one.kept, one.evicted) == (0, {2, 3}, [0, 4, 1])
    assert two.prior == pytest.approx(0.057998, abs=1e-6)
    assert (two.scores is None) == (refresh != 1)
    if two.scores is not None:
        assert list(two.scores[0].values()) == pytest.approx(STEP_2, abs=2e-6)
    assert two.utilities == pytest.approx(second, abs=2e-6)
    assert two.evicted == [dropped]
    assert two.kept == {2, 3, 5} - {dropped}


def test_attention_after_eviction_uses_absolute_positions():
    # positions 0 and 3 held, query at 4: softmax of (sin 4, sin 1) / sqrt(2)
    params, config = two_number_model(query=[1.0, 0.0])
    params = llama.cast(params, np.float64)
    caches, _ = llama.prefill(params, config, [0] * 4)
    for position in (1, 2):
        caches[0].drop(position)
    caches[0].drop(0)
    caches[0].drop(3)
    for position in (0, 3):
        caches[0].insert(
            position,
            llama.rotate(np.array([[0.0, 1.0]]), position, np.ones(1)),
            np.zeros((1, 2)),
        )
    _, ((p,),) = llama.step(params, config, caches, 0, 4)
    assert p[:2] / p[:2].sum() == pytest.approx([0.244133, 0.755867], abs=1e-6)


def test_run_schedules_and_sizes():
    config = tiny_config()
    params = random_params(config, seed=1)
    prompt = np.random.default_rng(2).integers(0, 97, size=30)
    for refresh, scored in [(1, range(1, 13)), (4, [1, 5, 9]), (0, [1])]:
        records = method.run(params, config, prompt, steps=12, ratio=0.9, refresh=refresh)
        assert [t for t, r in enumerate(records) if r.scores is not None] == list(scored)
        assert [len(r.kept) for r in records] == [30] + [3] * 12
        assert [len(r.evicted) for r in records] == [0, 28] + [1] * 11
        for t, record in enumerate(records[1:], start=1):
            assert 30 + t - 1 in record.utilities
            for scores in record.scores or []:
                assert sum(scores.values()) == pytest.approx(1)


def test_ratio_zero_and_large_budgets_evict_nothing():
    config = tiny_config()
    params = random_params(config, seed=1)
    full = method.run(params, config, [5, 6, 7], steps=9, ratio=0)
    assert [len(r.kept) for r in full] == list(range(3, 13))
    large = method.run(params, config, [5, 6, 7], steps=9, budget=8)
    assert [len(r.kept) for r in large] == [3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
    assert [r.token for r in full[1:6]] == [r.token for r in large[1:6]]


def test_protected_positions_stay():
    config = tiny_config()
    params = random_params(config, seed=3)
    prompt = np.random.default_rng(4).integers(0, 97, size=30)
    records = method.run(
        params, config, prompt, steps=12, budget=6, protect_first=2, protect_recent=3
    )
    for t, record in enumerate(records[1:], start=1):
        assert len(record.kept) == 6
        assert {0, 1, 27 + t, 28 + t, 29 + t} <= record.kept
    with pytest.raises(ValueError, match="room for 1 and the protected tokens, got 4"):
        method.run(params, config, prompt, steps=1, budget=4, protect_first=2, protect_recent=3)


def test_forced_tokens_are_inserted():
    config = tiny_config()
    params = random_params(config, seed=3)
    greedy = method.run(params, config, [1, 2, 3], steps=5, ratio=0.5)
    forced = [r.token for r in greedy[1:]]
    assert forced == [r.next_token for r in greedy[:-1]]
    again = method.run(params, config, [1, 2, 3], steps=5, ratio=0.5, forced_tokens=forced)
    assert [r.kept for r in again] == [r.kept for r in greedy]
    other = method.run(params, config, [1, 2, 3], steps=5, ratio=0.5, forced_tokens=[9] * 5)
    assert [r.token for r in other[1:]] == [9] * 5


# --- the transformer ------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "tied"), [(False, False), (True, True)])
def test_prefill_equals_steps(bias, tied):
    config = tiny_config()
    params = random_params(config, seed=5, bias=bias, tied=tied)
    prompt = [int(x) for x in np.random.default_rng(6).integers(0, 97, size=12)]
    caches, logits = llama.prefill(params, config, prompt)
    stepped = [llama.LayerCache() for _ in range(config.num_layers)]
    for position, token in enumerate(prompt):
        expected, _ = llama.step(params, config, stepped, token, position)
    np.testing.assert_allclose(logits, expected, atol=1e-12)
    for a, b in zip(caches, stepped, strict=True):
        assert a.positions == b.positions == list(range(12))
        np.testing.assert_allclose(a.keys, b.keys, atol=1e-12)
        np.testing.assert_allclose(a.values, b.values, atol=1e-12)


def test_rotation_pairs_the_halves():
    x = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 2.0]])
    speeds = np.array([np.pi / 2, np.pi / 4])
    half = math.sqrt(0.5)
    expected = [[0, 0, 1, 0], [0, -half, 0, 3 * half]]
    np.testing.assert_allclose(llama.rotate(x, 1, speeds), expected, atol=1e-12)


def params_of(torch_model, config):
    """The parameter tree of a transformers model."""
    state = {name: x.double().numpy() for name, x in torch_model.state_dict().items()}

    def dense(name):
        p = {"kernel": state[f"{name}.weight"].T}
        if f"{name}.bias" in state:
            p["bias"] = state[f"{name}.bias"]
        return p

    params = {
        "embed": {"embedding": state["model.embed_tokens.weight"]},
        "final_norm": {"scale": state["model.norm.weight"]},
    }
    if not torch_model.config.tie_word_embeddings:
        params["lm_head"] = dense("lm_head")
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        params[f"layers_{layer}"] = {
            "input_norm": {"scale": state[f"{at}.input_layernorm.weight"]},
            "post_attention_norm": {"scale": state[f"{at}.post_attention_layernorm.weight"]},
            "attention": {
                name: dense(f"{at}.self_attn.{name}")
                for name in ("q_proj", "k_proj", "v_proj", "o_proj")
            },
            "mlp": {
                name: dense(f"{at}.mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")
            },
        }
    return params


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def transformers_model(family, seed):
    """A tiny random transformers model in float64, and its config as ours."""
    torch = pytest.importorskip("torch", reason="torch is the outside reference")
    transformers = pytest.importorskip("transformers", reason="the outside reference")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    scaling = None
    if family == "llama3":
        rope = {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}
        scaling = SimpleNamespace(rope_type="llama3", **LLAMA3)
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "llama3": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    config_class, model_class = kinds[family]
    extra = {"sliding_window": None} if family == "mistral" else {}
    hf_config = config_class(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters=rope,
        tie_word_embeddings=family == "qwen2",
        attn_implementation="eager",
        **extra,
    )
    torch.manual_seed(seed)
    model = model_class(hf_config).double().eval()
    with torch.no_grad():  # far from uniform attention; biases and norm scales that matter
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.4 if p.ndim == 2 else 0.3))
            if "norm" in name:
                p.add_(1.0)
    config = tiny_config(rope_theta=rope["rope_theta"], rope_scaling=scaling)
    return torch, model, config


FAMILIES = ["llama", "llama3", "mistral", "qwen2"]


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family):
    torch, model, config = transformers_model(family, seed=7)
    prompt = np.random.default_rng(8).integers(0, 97, size=70)
    with torch.no_grad():
        expected = model(torch.tensor(prompt)[None]).logits[0].numpy()
    params = params_of(model, config)
    _, logits = llama.prefill(params, config, prompt[:50])
    # transformers rotates in float32: observed error below 3e-5
    np.testing.assert_allclose(logits, expected[49], atol=2e-4)
    records = method.run(
        params, config, prompt[:50], steps=20, ratio=0, forced_tokens=[int(x) for x in prompt[50:]]
    )
    for record, row in zip(records, expected[49:], strict=True):
        np.testing.assert_allclose(record.logits, row, atol=2e-4)


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_eviction_equals_transformers_under_a_mask(family):
    """One transformers pass over prompt and answer, each answer token seeing what it held.

    A token's attention row may look at the tokens kept by the step before it and at itself; so a
    4D mask made from the kept sets must give back every logit and every layer's scores.
    """
    torch, model, config = transformers_model(family, seed=9)
    prompt = np.random.default_rng(10).integers(0, 97, size=40)
    records = method.run(params_of(model, config), config, prompt, steps=20, ratio=0.8)
    tokens = [*map(int, prompt), *(r.token for r in records[1:])]
    seen = np.tril(np.ones((60, 60), bool))
    for t in range(1, 21):
        held = records[t - 1].kept | {39 + t}
        seen[39 + t] = [i in held for i in range(60)]
    mask = torch.tensor(np.where(seen, 0.0, -1e30))[None, None]
    with torch.no_grad():
        out = model(torch.tensor(tokens)[None], attention_mask=mask, output_attentions=True)
    for t, record in enumerate(records):
        row = 39 + t
        np.testing.assert_allclose(record.logits, out.logits[0, row].numpy(), atol=2e-4)
        if t:
            assert len(record.kept) == 8
            assert record.scores is not None
            for scores, attention in zip(record.scores or [], out.attentions, strict=True):
                expected = attention[0, :, row].mean(0).numpy()
                assert scores == pytest.approx({i: expected[i] for i in scores}, abs=2e-5)


def test_the_oracle_imports_only_numpy_and_the_standard_library():
    folder = Path(method.__file__).parent
    names = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
    assert names == {"numpy", "dataclasses", "fractions", "math", "types"}
