"""Kept positions against NVIDIA's kvpress, on a random model with the same weights.

kvpress evicts after prefill; here a decode-time method evicts at step 1, with one token more. So it
is given the prompt and that token, and the same number of tokens to keep. Where they differ, the
line says why.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from peer_models import transformers_model
from weights.tiny_files import SIZES, write_tokenizer_json

import inertiakv_jax as ikv
from inertiakv_jax import policies, prose
from inertiakv_jax.text import with_repetition

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
transformers = pytest.importorskip("transformers")
kvpress = pytest.importorskip("kvpress", reason="needs kvpress (extra 'peers')")

LENGTH, STEPS, KEPT = 150, 12, 30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One random Llama, there and here."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        **SIZES | {"max_position_embeddings": 1024, "eos_token_id": None},
        attn_implementation="sdpa",
    )
    theirs = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    theirs.eval().save_pretrained(folder)
    write_tokenizer_json(folder)
    theirs.config._name_or_path = str(folder)
    return theirs, ikv.load(folder)


def tokens(count=LENGTH + STEPS):
    return np.random.default_rng(4).integers(3, SIZES["vocab_size"], size=count)


def recording(press_class, **options):
    """The press, which also notes what it kept of the cache: [K, kept] indices a call and layer."""

    class Recorded(press_class):
        def score(self, module, *arguments):
            scores = super().score(module, *arguments)
            kept = kvpress.utils.compute_n_kept(scores.shape[-1], self.compression_ratio)
            chosen = scores.topk(kept, dim=-1).indices[0].numpy()
            self.kept.setdefault(module.layer_idx, []).append(chosen)
            return scores

    press = Recorded(**options)
    press.kept = {}
    return press


def forward(model, ids, cache, start):
    places = torch.arange(start, start + len(ids))
    with torch.no_grad():
        model(
            torch.from_numpy(ids)[None],
            past_key_values=cache,
            position_ids=places[None],
            cache_position=places,
        )


def kept_after_prefill(model, press, ids):
    """Sets of positions [layers][kv heads] that a press keeps of a prompt."""
    with press(model):
        forward(model, ids, transformers.DynamicCache(), 0)
    return [[set(head.tolist()) for head in press.kept[layer][0]] for layer in sorted(press.kept)]


def run(lm, policy, ids, steps):
    """Our states after each of ``steps`` decode steps, forced to the tokens behind the prompt."""
    prompt = ids[: len(ids) - steps] if steps else ids
    state, _ = ikv.prefill(
        lm.model, lm.params, prompt[None], np.array([len(prompt)]), policy, max_new_tokens=64
    )
    states = [state]
    for token in ids[len(prompt) :]:
        state, _ = ikv.decode(
            lm.model,
            lm.params,
            state,
            jnp.asarray([token], jnp.int32),
            steps=1,
            policy=policy,
            donate=False,
        )
        states.append(state)
    return states


def held(state):
    """Sets of positions [layers][kv heads] of the one row."""
    positions, valid = np.asarray(state.positions), np.asarray(state.valid)
    shape = (len(state.keys), state.keys[0].shape[1], state.num_slots)
    if positions.ndim == 2:
        positions, valid = (np.broadcast_to(x[:, None], shape) for x in (positions, valid))
    elif positions.ndim == 3:
        positions, valid = (np.broadcast_to(x, shape) for x in (positions, valid))
    else:
        positions, valid = positions[:, 0], valid[:, 0]
    return [
        [set(p[v].tolist()) for p, v in zip(*layer, strict=True)]
        for layer in zip(positions, valid, strict=True)
    ]


def ratio(kept, length):
    return 1 - (kept + 0.5) / length  # kvpress takes int(length * (1 - ratio))


@pytest.mark.parametrize(
    ("name", "press"),
    [
        ("keydiff", "KeyDiffPress"),
        ("knorm", "KnormPress"),
        ("streaming-llm", "StreamingLLMPress"),
        # kvpress never drops the last token.
        ("tova", "TOVAPress"),
    ],
)
def test_at_step_one(models, name, press):
    theirs, lm = models
    ids = tokens(LENGTH + 1)
    press = recording(getattr(kvpress, press), compression_ratio=ratio(KEPT, len(ids)))
    expected = kept_after_prefill(theirs, press, ids)
    options = {"protect_recent": 1} if name == "tova" else {}
    policy = policies.by_name(name, tokens=KEPT, **options)
    assert held(run(lm, policy, ids, 1)[-1]) == expected
    assert all(len(head) == KEPT for layer in expected for head in layer)


def test_tova_step_by_step(models):
    """The same tokens after each of twelve steps: one goes at each, in each layer its own."""
    theirs, lm = models
    ids = tokens()
    press = kvpress.DecodingPress(
        recording(kvpress.TOVAPress), compression_interval=1, target_size=KEPT
    )
    cache = transformers.DynamicCache()
    expected = [[list(range(LENGTH)) for _ in range(SIZES["num_key_value_heads"])]
                for _ in range(SIZES["num_hidden_layers"])]  # fmt: skip
    states = run(lm, policies.tova(tokens=KEPT, protect_recent=1), ids, STEPS)[1:]
    different = set()
    with press(theirs):
        forward(theirs, ids[:LENGTH], cache, 0)
        for step, state in enumerate(states):
            position = LENGTH + step
            forward(theirs, ids[position : position + 1], cache, position)
            for layer, heads in enumerate(expected):
                for head, places in enumerate(heads):
                    places.append(position)
                    chosen = press.base_press.kept[layer][step][head]
                    heads[head] = [places[index] for index in chosen]
            assert held(state) == [[set(head) for head in heads] for heads in expected], step
            different.add(frozenset(expected[0][0]) == frozenset(expected[1][0]))
    assert different == {False}  # layers do keep different tokens: the test can see them mixed up


def test_snapkv(models):
    theirs, lm = models
    ids = tokens(LENGTH)
    press = recording(
        kvpress.SnapKVPress, compression_ratio=ratio(KEPT, LENGTH), window_size=16, kernel_size=5
    )
    expected = kept_after_prefill(theirs, press, ids)
    policy = policies.snapkv(tokens=KEPT, window=16)
    assert held(run(lm, policy, ids, 0)[0]) == expected


def masked(model, length):
    """Sets of positions [layers][kv heads] outside what kvpress masks in place of evicting."""
    kept = []
    for layer in model.model.layers:
        heads = [set(range(length)) for _ in range(SIZES["num_key_value_heads"])]
        _, head_indices, places = layer.self_attn.masked_key_indices
        for head, place in zip(head_indices.tolist(), places.tolist(), strict=True):
            heads[head].remove(place)
        kept.append(heads)
        layer.self_attn.masked_key_indices = None
    return kept


def test_expected_attention_with_ada_kv(models):
    theirs, lm = models
    ids = tokens(LENGTH)
    inner = kvpress.ExpectedAttentionPress(compression_ratio=ratio(KEPT, LENGTH))
    with kvpress.AdaKVPress(inner)(theirs):
        forward(theirs, ids, transformers.DynamicCache(), 0)
    expected = masked(theirs, LENGTH)
    got = held(run(lm, policies.adakv_ea(tokens=KEPT), ids, 0)[0])
    assert got == expected
    counts = [[len(head) for head in layer] for layer in got]
    assert all(sum(layer) == KEPT * len(layer) for layer in counts)
    assert any(count != KEPT for layer in counts for count in layer)


def test_kvzip(models):
    """A quarter of all is kept, wherever it is."""
    theirs, lm = models
    ids = tokens(200)
    press = kvpress.KVzipPress(compression_ratio=0.75, chunk_size=2048)
    with press(theirs):
        forward(theirs, ids, transformers.DynamicCache(), 0)
    expected = masked(theirs, len(ids))
    policy = with_repetition(policies.kvzip(0.75), lm)
    got = held(run(lm, policy, ids, 0)[0])
    assert got == expected
    counts = [len(head) for layer in got for head in layer]
    assert sum(counts) == 50 * len(counts)
    assert len(set(counts)) > 1


@pytest.mark.real_weights
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "press", "options"),
    [
        ("tova", "TOVAPress", {}),
        ("keydiff", "KeyDiffPress", {}),
        ("snapkv", "SnapKVPress", {"window_size": 64, "kernel_size": 5}),
    ],
)
def test_on_smollm2(smollm2, name, press, options):
    """The same 100 of 400 tokens in each of 30 layers, or 90 heads."""
    theirs = transformers_model(smollm2, torch)
    text = prose.planted_text(500, 1, lambda text: len(smollm2.tokenizer(text)["input_ids"])).text
    ids = np.asarray(smollm2.tokenizer(text)["input_ids"])[:400]
    once = name == "snapkv"
    press = recording(getattr(kvpress, press), compression_ratio=ratio(100, 400), **options)
    expected = kept_after_prefill(theirs, press, ids)
    policy = policies.by_name(name, tokens=100, **({"protect_recent": 1} if name == "tova" else {}))
    got = held(run(smollm2, policy, ids, 0 if once else 1)[-1])
    assert got == expected
    assert {len(head) for layer in got for head in layer} == {100}
