import dataclasses
import re
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv_jax import policies
from inertiakv_jax.budget import tokens_kept_of_seen
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.policies import Policy
from inertiakv_jax.state import NO_EVICTION

CONFIG = ModelConfig(
    family="llama",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=8,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
MODEL = DecoderModel(CONFIG)
TOKEN_BYTES = 2 * 3 * 1 * 4 * 4  # keys and values, layers, kv heads, head_dim, bytes of float32


# What floor((1 - ratio) * length) gives in float64 is wrong for half of these.
@pytest.mark.parametrize(
    ("ratio", "length", "kept"),
    [
        (0.9, 10, 1),
        (0.8, 5, 1),
        (0.9, 100, 10),
        (0.8, 100, 20),
        (0.9, 1000, 100),
        (0.99, 100, 1),
        (0.8, 4095, 819),
        (0.6, 2, 1),
        (0.9, 3, 1),
        (0.9, 1, 1),
        (0.5, 7, 3),
        (0.07, 100, 93),
        (0.9, 64_029, 6_402),
        (1e-9, 10, 9),
    ],
)
def test_ratio_budget(ratio, length, kept):
    assert policies.tokens_kept(length, ratio) == kept
    assert policies.inertiakv(ratio).budgets([length], MODEL).tolist() == [kept]


@given(thousandths=st.integers(1, 999), length=st.integers(1, 10**6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_ratio_budget_is_exact(thousandths, length):
    removed = Fraction(thousandths, 1000) * length
    expected = max(1, length - -(-removed.numerator // removed.denominator))
    assert policies.tokens_kept(length, float(f"0.{thousandths:03d}")) == expected


def test_each_row_has_its_budget():
    budgets = policies.inertiakv(0.4).budgets([3, 5], MODEL)
    assert budgets.tolist() == [1, 3]
    assert budgets.dtype == np.int32
    assert policies.inertiakv(tokens=7).budgets([3, 500], MODEL).tolist() == [7, 7]
    assert policies.full().budgets([3, 5], MODEL).tolist() == [NO_EVICTION] * 2
    assert policies.inertiakv(0.0).budgets([3, 5], MODEL).tolist() == [NO_EVICTION] * 2
    assert policies.inertiakv(tokens=10**12).budgets([3], MODEL).tolist() == [NO_EVICTION]


@pytest.mark.parametrize(
    ("kv_bytes", "tokens"),
    [(TOKEN_BYTES, 1), (TOKEN_BYTES * 5, 5), (TOKEN_BYTES * 6 - 1, 5)],
)
def test_byte_budget(kv_bytes, tokens):
    assert policies.kv_bytes_per_token(MODEL) == TOKEN_BYTES == 96
    assert policies.inertiakv(kv_bytes=kv_bytes).budgets([9], MODEL).tolist() == [tokens]
    half = DecoderModel(CONFIG, "bfloat16")
    assert policies.kv_bytes_per_token(half) == 48
    assert policies.inertiakv(kv_bytes=kv_bytes).budgets([9], half)[0] in (
        2 * tokens,
        2 * tokens + 1,
    )


@pytest.mark.parametrize(
    ("name", "refresh", "scores", "skips"),
    [
        ("inertiakv", 1, True, False),
        ("lazy1", 1, True, False),
        ("lazy4", 4, True, True),
        ("lazy16", 16, True, True),
        ("score-free", 0, False, True),
    ],
)
def test_names(name, refresh, scores, skips):
    policy = policies.by_name(name, ratio=0.75)
    assert (policy.name, policy.refresh, policy.ratio, policy.alpha) == (name, refresh, 0.75, 0.8)
    assert (policy.evicts, policy.scores_some_steps, policy.skips_some_steps) == (
        True,
        scores,
        skips,
    )


def test_full():
    for policy in (policies.full(), policies.by_name("full"), policies.by_name("full", ratio=0.9)):
        assert (policy.name, policy.ratio, policy.evicts) == ("full", 0.0, False)
        assert (policy.scores_some_steps, policy.skips_some_steps) == (False, True)


def test_default_ratio_and_names_of_makers():
    assert policies.inertiakv() == policies.by_name("inertiakv", 0.9)
    assert policies.lazy(4) == policies.by_name("lazy4", 0.9) == policies.inertiakv(0.9, refresh=4)
    assert policies.score_free() == policies.by_name("score-free") == policies.inertiakv(refresh=0)
    assert policies.inertiakv(tokens=9).ratio is None
    assert policies.by_name("lazy2", tokens=9, protect_first=3) == policies.lazy(
        2, tokens=9, protect_first=3
    )


def test_policies_are_values():
    assert hash(policies.lazy(4)) == hash(policies.lazy(4))
    assert policies.lazy(4) != policies.lazy(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policies.lazy(4).ratio = 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_knobs():
    policy = policies.inertiakv(0.9, alpha=0.5, refresh=4, protect_first=2, protect_recent=3)
    knobs = policy.knobs(MODEL)
    assert float(knobs.decay) == 0.125
    assert knobs.layer_weights.tolist() == [0.125, 0.25, 0.5]
    assert [int(x) for x in (knobs.refresh, knobs.protect_first, knobs.protect_recent)] == [4, 2, 3]
    assert knobs.decay.dtype == knobs.layer_weights.dtype == jnp.float32
    assert float(policies.inertiakv(0.9, alpha=0.0).knobs(MODEL).decay) == 0.0


@pytest.mark.parametrize(
    "name", ["", "Full", "lazy", "lazy0", "lazy-1", "lazy04", "lazy4\n", "h20", "inertia kv"]
)
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=re.escape(f"unknown policy {name!r}")) as error:
        policies.by_name(name)
    assert all(known in str(error.value) for known in ("full", "inertiakv", "score-free", "lazyR"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 1.0}, r"ratio must be a number in \[0, 1\), got 1.0"),
        ({"ratio": -0.1}, r"ratio must be .*got -0.1"),
        ({"ratio": float("nan")}, r"ratio must be .*got nan"),
        ({"ratio": "0.9"}, r"ratio must be .*got '0.9'"),
        ({"ratio": 90}, r"ratio must be .*got 90"),
        ({"tokens": 0, "ratio": None}, r"tokens must be an integer >= 1, got 0"),
        ({"tokens": 1.5, "ratio": None}, r"tokens must be an integer >= 1, got 1.5"),
        ({"tokens": True, "ratio": None}, r"tokens must be an integer >= 1, got True"),
        ({"kv_bytes": -5, "ratio": None}, r"kv_bytes must be an integer >= 1, got -5"),
        ({"ratio": None}, r"exactly one of ratio, tokens, kv_bytes, got none"),
        ({"tokens": 5}, r"exactly one of .*got ratio=0.9 and tokens=5"),
        ({"alpha": 1.0}, r"alpha must be a number in \[0, 1\), got 1.0"),
        ({"alpha": -0.5}, r"alpha must be .*got -0.5"),
        ({"alpha": float("nan")}, r"alpha must be .*got nan"),
        ({"alpha": None}, r"alpha must be .*got None"),
        ({"refresh": -1}, r"refresh must be an integer >= 0, got -1"),
        ({"refresh": 2.0}, r"refresh must be an integer >= 0, got 2.0"),
        ({"protect_first": -1}, r"protect_first must be an integer >= 0, got -1"),
        ({"protect_recent": 0.5}, r"protect_recent must be an integer >= 0, got 0.5"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        Policy("inertiakv", **({"ratio": 0.9} | options))


@pytest.mark.parametrize("refresh", [0, -4, 1.5, "4", True])
def test_bad_lazy_interval(refresh):
    with pytest.raises(ValueError, match=r"refresh must be an integer >= 1, got"):
        policies.lazy(refresh)


def test_zero_tokens_is_an_error_of_tokens():
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, got 0"):
        policies.inertiakv(tokens=0)


def test_protected_tokens_must_fit_the_smallest_budget():
    policy = policies.inertiakv(0.9, protect_first=4, protect_recent=4)
    assert policy.budgets([80, 200], MODEL).tolist() == [8, 20]
    with pytest.raises(ValueError, match=r"protect_first=4 and protect_recent=4 .* 7 tokens"):
        policy.budgets([200, 79], MODEL)


def test_bytes_below_one_token():
    with pytest.raises(ValueError, match=r"kv_bytes=95 is below one token's 96"):
        policies.inertiakv(kv_bytes=95).budgets([9], MODEL)


def test_numpy_numbers():
    assert policies.inertiakv(np.float64(0.0)) == policies.inertiakv(0.0)
    assert policies.inertiakv(np.float64(0.0)).scores_some_steps is False
    assert policies.inertiakv(np.float64(0.9)).scores_some_steps is True
    assert policies.inertiakv(tokens=np.uint8(200)).budgets([9], MODEL).tolist() == [200]


def test_numbers_beyond_int32_are_as_good_as_its_largest():
    policy = policies.inertiakv(tokens=10**30, refresh=10**20, protect_first=2**31)
    assert policy.budgets([9], MODEL).tolist() == [2**31 - 1]
    assert policy.knobs(MODEL).refresh == policy.knobs(MODEL).protect_first == 2**31 - 1


def test_full_refuses_what_it_would_ignore_if_it_is_out_of_range():
    assert policies.by_name("full", 0.9, alpha=0.5) == policies.full()
    with pytest.raises(ValueError, match=r"ratio must be a number in \[0, 1\), got 7"):
        policies.by_name("full", 7)
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, got 0"):
        policies.by_name("full", tokens=0)


def test_score_free_has_no_other_interval():
    with pytest.raises(ValueError, match="score-free never rescores: refresh must be 0, got 4"):
        policies.score_free(refresh=4)


@pytest.mark.parametrize("name", [None, 4, b"full"])
def test_names_are_strings(name):
    with pytest.raises(ValueError, match=r"policy must be a name, got .*lazyR"):
        policies.by_name(name)


METHOD_FIELDS = {
    # name: scorer, retention, decay, layer weights, refresh, protected first and share of recent
    "inertiakv": ("attention", "shared", None, "sequential", 1, 0, 0.0),
    "single-step": ("attention", "shared", 0.0, "uniform", 1, 0, 0.0),
    "cumulative": ("attention", "shared", 1.0, "uniform", 1, 0, 0.0),
    "tova": ("attention", "per_layer", 0.0, "sequential", 1, 0, 0.0),
    "h2o": ("attention", "per_head", 1.0, "sequential", 1, 0, 0.5),
    "keydiff": ("keydiff", "per_head", 0.0, "sequential", 1, 0, 0.0),
    "knorm": ("knorm", "per_head", 0.0, "sequential", 1, 0, 0.0),
    "streaming-llm": ("recency", "shared", 0.0, "sequential", 1, 4, 0.0),
    "random": ("random", "shared", None, "sequential", 1, 0, 0.0),
    "vnorm": ("vnorm", "shared", None, "sequential", 1, 0, 0.0),
    "entropy": ("entropy", "shared", None, "sequential", 1, 0, 0.0),
    "recency": ("recency", "shared", 0.0, "sequential", 1, 0, 0.0),
}


@pytest.mark.parametrize("name", METHOD_FIELDS)
def test_methods(name):
    policy = policies.by_name(name, 0.75)
    assert policy.name == name
    assert policy.ratio == 0.75
    assert METHOD_FIELDS[name] == (
        policy.scorer,
        policy.retention,
        policy.decay,
        policy.layer_weights,
        policy.refresh,
        policy.protect_first,
        policy.recent_fraction,
    )


@pytest.mark.parametrize(
    ("name", "scorer", "head_budgets", "protect_first"),
    [
        ("snapkv", "snapkv", "equal", 0),
        ("adakv-ea", "expected-attention", "layer", 4),
        ("kvzip", "kvzip", "model", 4),
    ],
)
def test_prefill_time_methods(name, scorer, head_budgets, protect_first):
    policy = policies.by_name(name, 0.75)
    method = policy.prefill
    assert (policy.name, policy.evicts, policy.retention) == (name, False, "per_head")
    assert method is not None
    assert (method.scorer, method.ratio, method.head_budgets, method.protect_first) == (
        *(scorer, 0.75, head_budgets, protect_first),
    )
    assert method.budgets([100, 3], MODEL).tolist() == [25, 1]
    assert policies.by_name(name, tokens=50).prefill.budgets([100, 3], MODEL).tolist() == [50, 3]


def test_composition():
    policy = policies.by_name("adakv-ea+lazy4", 0.9, prefill_ratio=0.25, protect_first=2)
    assert policy == dataclasses.replace(
        policies.lazy(4, 0.9, protect_first=2), name="adakv-ea+lazy4", prefill=policy.prefill
    )
    assert policy.prefill.ratio == 0.25
    # A shared ranking needs the same tokens everywhere.
    assert (policy.prefill.retention, policy.prefill.head_budgets) == ("shared", "equal")
    apart = policies.by_name("adakv-ea+keydiff").prefill
    assert (apart.retention, apart.head_budgets, apart.ratio) == ("per_head", "layer", 0.5)
    with pytest.raises(ValueError, match="'tova' is no prefill-time method"):
        policies.by_name("tova+lazy4")
    with pytest.raises(ValueError, match="'kvzip' is a prefill-time method, too"):
        policies.by_name("snapkv+kvzip")


def test_named_aggregation():
    policy = policies.by_name("tova", aggregation="cumulative")
    assert (policy.decay, policy.retention) == (1.0, "per_layer")
    with pytest.raises(ValueError, match=r"aggregation must be one of layer-sequential, .*'mean'"):
        policies.inertiakv(aggregation="mean")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("inertiakv", {"alfa": 0.5}, "policy 'inertiakv' has no option 'alfa'; it takes ratio,"),
        ("inertiakv", {"window": 3}, "has no option 'window'"),
        ("snapkv", {"alpha": 0.5}, "policy 'snapkv' has no option 'alpha'; .*window"),
        ("inertiakv", {"scorer": "magic"}, "scorer must be one of attention, .*got 'magic'"),
        ("inertiakv", {"retention": "heads"}, "retention must be one of shared, .*got 'heads'"),
        ("inertiakv", {"decay": 1.1}, r"decay must be a number in \[0, 1\], got 1.1"),
        ("inertiakv", {"layer_weights": "first"}, "layer_weights must be one of .*got 'first'"),
        ("inertiakv", {"layer_weights": [1, -1]}, "layer_weights must be .*got .1, -1."),
        ("inertiakv", {"ratio_of": "text"}, "ratio_of must be one of prompt, seen, got 'text'"),
        ("inertiakv", {"ratio_of": "seen", "tokens": 5}, "ratio_of='seen' needs a ratio"),
        ("inertiakv", {"recent_fraction": 1}, r"recent_fraction must be .*got 1"),
        ("inertiakv", {"seed": 2**32}, r"seed must be an integer below 2\*\*32"),
        ("inertiakv", {"prompt_queries": 3}, "prompt_queries=3 .*decay must be 1, got None"),
        ("inertiakv", {"scorer": "learned"}, "scorer_weights, .*belongs to the scorer 'learned'"),
        ("learned", {}, "policy 'learned' needs scorer_weights="),
        ("snapkv", {"window": 0}, "SnapKV needs a window of at least 1 query"),
        ("snapkv", {"pool": 4}, r"pool must be an odd integer in 1 .. 1025, got 4"),
        ("snapkv", {"head_budgets": "layer", "retention": "shared"}, "needs retention 'per_head'"),
        ("snapkv", {"pool": 10**6 + 1}, r"pool must be an odd integer in 1 .. 1025, got 1000001"),
        ("snapkv", {"window": 2**31}, "window must be an integer in 0 .. .*got 2147483648"),
        ("kvzip", {"safeguard": 2}, r"safeguard must be in \[0, 1\], got 2"),
        ("kvzip", {"repeat_first": 5}, "repeat_first must be a tuple of token ids, got 5"),
        ("h2o", {"prompt_queries": 2**31}, "prompt_queries must be an .*got 2147483648"),
        ("inertiakv", {"refresh": [1]}, r"refresh must be an integer >= 0, got \[1\]"),
        ("inertiakv", {"aggregation": {}}, "aggregation must be one of .*got {}"),
        ("inertiakv", {"ratio": False}, r"ratio must be a number in \[0, 1\), got False"),
        ("inertiakv", {"decay": True}, r"decay must be a number in \[0, 1\], got True"),
        ("lazy4", {"refresh": 2}, "policy 'lazy4' has its refresh in its name, got another one"),
        ("learned", {"scorer_weights": [1]}, r"scorer_weights must be a path, got \[1\]"),
    ],
)
def test_bad_options_of_methods(name, options, message):
    with pytest.raises(ValueError, match=message):
        policies.by_name(name, **options)


def test_ratio_of_all_tokens_seen():
    """In whole numbers, up to a million tokens and for ratios of four decimals."""
    with pytest.raises(ValueError, match=r"at most four decimals, got 0.12345"):
        policies.inertiakv(0.12345, ratio_of="seen")
    for ratio in (0.9, 0.5, 0.1234, 0.9999, 0.333):
        knobs = policies.inertiakv(ratio, ratio_of="seen").knobs(MODEL)
        seen = np.array([1, 2, 3, 9, 10, 11, 99, 100, 101, 4095, 12_345, 999_999, 2**31 - 1])
        got = tokens_kept_of_seen(jnp.asarray(seen, jnp.int32), knobs.ratio_of_seen)
        assert got.tolist() == [policies.tokens_kept(int(n), ratio) for n in seen]


SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "policies").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files(path):
    policy = policies.by_name(str(path))
    assert policy.ratio == 0.9
    assert policies.by_name(str(path), 0.5).ratio == 0.5


def test_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: lazy8\ntokens: 50\nscorer: vnorm\nlayer_weights: [1, 2, 3]\n")
    expected = policies.lazy(8, tokens=50, scorer="vnorm", layer_weights=(1, 2, 3))
    assert policies.from_file(path) == policies.by_name(str(path)) == expected
    assert policies.by_name(str(path), 0.5).ratio == 0.5
    assert policies.by_name(str(path), alpha=0.5).alpha == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: inertiakv\nalfa: 0.5\n", "has no option 'alfa'"),
        ("- inertiakv\n", "expected a mapping with a name"),
        ("ratio: 0.9\n", "expected a mapping with a name"),
        ("name: [1\n", "mine.yaml"),
        ("name: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("name: inertiakv\n1: 2\n", "mine.yaml"),
        ("name: tova\nratio: 0.5\nratio: 0.9\n", "the key 'ratio' is there twice"),
        ("name: other.yaml\n", "must be a method's, got 'other.yaml'"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        policies.from_file(path)
    assert "mine.yaml" in str(error.value)


def test_policy_as_it_is_written(tmp_path):
    """Its own budget comes first, wherever it stands."""
    policy = policies.as_written("inertiakv,scorer=keydiff,alpha=0.5", 0.75)
    assert policy.name == "inertiakv,scorer=keydiff,alpha=0.5"
    assert (policy.scorer, policy.alpha, policy.ratio) == ("keydiff", 0.5, 0.75)
    policy = policies.as_written("tova,tokens=64,protect_recent=1", 0.75)
    assert (policy.tokens, policy.ratio, policy.protect_recent) == (64, None, 1)
    assert policies.as_written("lazy4").ratio == 0.9
    policy = policies.as_written("snapkv+lazy2", 0.75)
    assert (policy.name, policy.refresh, policy.ratio) == ("snapkv+lazy2", 2, 0.75)
    assert policy.prefill is not None
    path = tmp_path / "mine.yaml"
    path.write_text("name: inertiakv\nalpha: 0.5\n")
    policy = policies.as_written(str(path), 0.75)
    assert (policy.name, policy.alpha, policy.ratio) == (str(path), 0.5, 0.75)
    path.write_text("name: inertiakv\ntokens: 7\n")
    policy = policies.as_written(f"{path},alpha=0.5", 0.75)
    assert (policy.alpha, policy.tokens, policy.ratio) == (0.5, 7, None)


def test_no_such_file():
    with pytest.raises(ValueError, match=r"no policy at 'nowhere.yaml'"):
        policies.by_name("nowhere.yaml")


def test_a_merge_may_change_a_key(tmp_path):
    """YAML's own way to override: this is no key twice."""
    path = tmp_path / "mine.yaml"
    path.write_text("<<: {name: tova, ratio: 0.5}\nratio: 0.75\n")
    assert policies.from_file(path) == policies.tova(0.75)
