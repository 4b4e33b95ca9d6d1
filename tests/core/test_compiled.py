"""What is compiled, how often, and what the compiled programs keep in memory."""

import dataclasses
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.compilations import compiled_programs
from core.tiny_model import POLICIES, STEPS, decoded, params, prefilled, prompts

from inertiakv_jax import Sampling, decode, decoding, policies, prefill, prefilling
from inertiakv_jax import state as kv_state
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.models.decoder import DecoderModel

# A cache large beside everything else: 344 kB a leaf of one row, all weights 0.7 MB.
HEADS, SLOTS, HEAD_DIM = 3, 448, 64
CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=9,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=8192,
)
BIG = DecoderModel(CONFIG)

pytestmark = pytest.mark.optimized


# Programs are shared


def run(policy, rows=None, **options):
    state, token = prefilled(policy, rows)
    state, tokens = decoded(state, token, policy, **options)
    last = tokens[:, options.get("limit", STEPS) - 1]
    return decoded(state, last, policy, steps=5, **options)


@pytest.mark.parametrize("name", ["full", "inertiakv"])
def test_another_prompt_of_the_bucket_compiles_nothing(name):
    run(POLICIES[name])
    with compiled_programs() as names:
        run(POLICIES[name], prompts((20, 130, 165), seed=3))
        run(POLICIES[name], prompts((172, 1, 172), seed=4))
    assert names == []


def test_policies_share_the_prefill():
    prefilled(POLICIES["full"])
    with compiled_programs() as names:
        states = [prefilled(policies.inertiakv(ratio))[0] for ratio in (0.9, 0.6, 0.3)]
    assert names == []
    assert [(state.num_slots, state.kept_slots) for state in states] == [
        (192, 64),
        (192, 128),
        (192, 128),
    ]


def test_numbers_of_a_policy_compile_nothing():
    run(policies.lazy(4, 0.9))
    with compiled_programs() as names:
        run(policies.lazy(4, 0.88))
        run(policies.lazy(4, 0.7))
        run(policies.lazy(4, tokens=50))
        run(policies.lazy(4, 0.9, alpha=0.3))
        run(policies.lazy(4, 0.9, protect_first=2, protect_recent=3))
        run(policies.lazy(7, 0.9))
    assert names == []


def test_options_of_a_call_compile_nothing():
    policy = policies.lazy(4, 0.9)
    run(policy, sampling=Sampling(0.7, 5, 0.9, 0.1), key=jax.random.key(0))
    run(policy, stop_tokens=[3, 96])
    with compiled_programs() as names:
        run(policy, sampling=Sampling(1.1, 0, 0.5, 0.0), key=jax.random.key(1))
        run(policy, stop_tokens=[7, 8])
        run(policy, limit=STEPS - 2)
    assert names == []


def test_programs_of_one_run():
    """Prefill, step 1 in two, and the loop; the rest are copies between them."""
    model = DecoderModel(ModelConfig("llama", 97, 32, 48, 1, 4, 2, 8))
    weights = model.init(jax.random.key(0))
    policy = policies.lazy(4, 0.9)
    run(policy)  # compiles the small change between the programs
    with compiled_programs() as names:
        state, token = prefilled(policy, model=model, weights=weights)
        decode(model, weights, state, token, steps=STEPS, policy=policy)
    ours = ["jit(read_chunks)", "jit(_first_step)", "jit(_evict_to_budget)", "jit(_decode_loop)"]
    assert [name for name in names if name in ours] == ours
    assert len(names) <= 6


# The loop


class Captured(Exception):
    """Carries the arguments of a call that was not made."""


def lower(monkeypatch, module, name, call):
    """Lower the jitted function ``name`` of ``module`` for the arguments that ``call`` gives it."""

    def capture(*args, **kwargs):
        raise Captured(args, kwargs)

    jitted = getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, capture)
        with pytest.raises(Captured) as caught:
            call()
    args, kwargs = caught.value.args
    return jitted.lower(*args, **kwargs)


def big_params(model=BIG):
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(model.init, jax.random.key(0)),
    )


def compiled_loop(monkeypatch, policy, batch, steps, model=BIG, kept_slots=None):
    """The loop; with ``kept_slots`` the first of step 1's two programs."""
    budget = jnp.full((batch,), 400)
    state = kv_state.init(model, batch, SLOTS, budget=budget, kept_slots=kept_slots)
    token = jnp.zeros((batch,), jnp.int32)

    def call():
        decode(model, big_params(model), state, token, steps=steps, policy=policy)

    name = "_first_in_place" if kept_slots else "_decode_in_place"
    return lower(monkeypatch, decoding, name, call).compile()


def leaf_bytes(batch):
    return 4 * batch * HEADS * SLOTS * HEAD_DIM


def computations(text):
    """Name and lines of every computation of an HLO module."""
    found, name = {}, None
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = match[1]
            found[name] = []
        elif name is not None:
            found[name].append(line)
    return found


def called(lines):
    """Names of the computations that these lines call."""
    return {
        name
        for line in lines
        for group in re.findall(
            r"(?:calls|body|condition|to_apply|branch_computations|true_computation|"
            r"false_computation)=(\{[^}]*\}|%?[\w.-]+)",
            line,
        )
        for name in re.findall(r"[\w.-]+", group)
    }


def branches(found):
    """Names of all computations that run in a branch of a conditional."""
    branched = [line for lines in found.values() for line in lines if " conditional(" in line]
    names, new = set(), called(branched)
    while new:
        names |= new
        new = {name for known in new for name in called(found.get(known, []))} - names
    return names


def whole_buffers(found, batch):
    """Operation, and the line, of every instruction that makes a whole key or value buffer."""
    shape = rf"f32\[(?:{batch},)?{HEADS},{SLOTS},{HEAD_DIM}\]"
    cold = branches(found)
    for name, lines in found.items():
        for line in lines:
            match = re.match(rf"\s*(?:ROOT )?%?[\w.-]+ = \(?{shape}\S* ([\w-]+)\(", line)
            if match and name not in cold:
                yield match[1], line


@pytest.mark.parametrize("name", ["full", "lazy4"])
def test_the_loop_copies_no_cache_of_one_kv_head(monkeypatch, name):
    """One row of one kv head: a token is one row of the cache, which XLA:CPU treats apart."""
    model = DecoderModel(dataclasses.replace(CONFIG, num_kv_heads=1))
    compiled = compiled_loop(monkeypatch, POLICIES[name], batch=1, steps=32, model=model)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * leaf_bytes(1) / HEADS


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["full", "inertiakv", "lazy4"])
def test_the_loop_copies_no_cache(monkeypatch, name, batch):
    """Keys and values are scattered into in place.

    In a branch that is taken only where a dead slot holds NaN or infinity they are copied once;
    that scratch buffer is all of a cache's size among the temporaries.
    """
    compiled = compiled_loop(monkeypatch, POLICIES[name], batch, steps=32)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * leaf_bytes(batch)
    assert memory.alias_size_in_bytes > 4 * leaf_bytes(batch)  # two layers of keys and values

    found = computations(compiled.as_text())
    seen = set()
    for operation, line in whole_buffers(found, batch):
        seen.add(operation)
        if operation == "fusion":
            [body] = called([line])
            assert any("ROOT" in part and " scatter(" in part for part in found[body]), line
    assert "fusion" in seen or "scatter" in seen, "the cache was not found in the program"
    expected = {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter", "while", "tuple"}
    assert seen <= expected | {"optimization-barrier", "opt-barrier"}


def test_step_one_writes_into_the_full_cache(monkeypatch):
    """It copies no more of it than the loop does of a small one."""
    compiled = compiled_loop(monkeypatch, POLICIES["inertiakv"], 3, steps=1, kept_slots=448)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * leaf_bytes(3)
    assert memory.alias_size_in_bytes > 4 * leaf_bytes(3)


@pytest.mark.parametrize("name", ["full", "lazy4"])
def test_memory_does_not_grow_with_steps(monkeypatch, name):
    few, many = (
        compiled_loop(monkeypatch, POLICIES[name], 1, steps).memory_analysis().temp_size_in_bytes
        for steps in (512, 4096)
    )
    assert many - few <= 4 * (4096 - 512)  # the tokens themselves, int32


# Prefill


def compiled_prefill(monkeypatch, length):
    tokens = np.zeros((1, length), int)

    def call():
        prefill(BIG, big_params(), tokens, np.array([length]), POLICIES["inertiakv"])

    return lower(monkeypatch, prefilling, "read_chunks", call).compile()


def test_prefill_is_linear_in_memory(monkeypatch):
    temporaries = []
    for length in (1020, 2040, 4090):
        compiled = compiled_prefill(monkeypatch, length)
        slots = length + 1024 - length % 1024
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        shapes = set(re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text()))
        sizes = [sorted(map(int, shape.split(","))) for shape in shapes]
        assert any(slots in size for size in sizes), "the cache was not found in the program"
        assert not [size for size in sizes if len(size) > 1 and size[-2] >= slots]
    assert temporaries[1] <= 2.2 * temporaries[0]
    assert temporaries[2] <= 2.2 * temporaries[1]


# What stays alive


def live():
    gc.collect()
    return {id(array): array for array in jax.live_arrays()}


@pytest.mark.parametrize("name", ["inertiakv", "score-free"])
def test_the_full_cache_is_freed_at_step_one(name):
    policy = POLICIES[name]
    run(policy)  # constants that compiled programs keep
    params()
    before = live()
    state, token = prefilled(policy)
    assert state.num_slots == 192
    state, _ = decoded(state, token, policy, steps=1)
    del token
    new = [array for key, array in live().items() if key not in before]
    large = [array for array in new if array.nbytes > 64 * 8 * 3]
    # three layers of keys and values, 3 rows, 2 heads, 64 slots, head_dim 8, float32
    assert sorted(array.shape for array in large) == [(3, 2, 64, 8)] * 6
    assert sum(array.nbytes for array in large) == state.kv_bytes() == 73_728
    assert sum(array.nbytes for array in new) < 73_728 + 8_192
