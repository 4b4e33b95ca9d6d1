"""From prompts to texts with a model that follows a script: ends, counts, statistics, errors."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from core.compilations import compiled_programs
from generation.scripted import EOS, TOKEN_BYTES, ids_of, language_model

import inertiakv_jax as ikv
from inertiakv_jax import policies
from inertiakv_jax.text import encode_prompts

TEXT = "Once there was a model that did as it was told, to the letter, and no more. "
LM = language_model(TEXT * 3)
NAMES = ("full", "inertiakv", "lazy4", "score-free")


def generate(prompts, *, lm=LM, **options):
    return ikv.generate(lm, prompts, **({"policy": "lazy4"} | options))


def pieces(prompts, *, lm=LM, **options):
    """What ``stream`` yields, and what it returns."""
    yielded, chunks = [], ikv.stream(lm, prompts, **({"policy": "lazy4"} | options))
    while True:
        try:
            yielded.append(next(chunks))
        except StopIteration as stop:
            return yielded, stop.value


def expected(start, count):
    return (TEXT * 3)[start : start + count]


# Counts: the first token comes from prefill, the second from step 1, then chunks of 16 steps.


@pytest.mark.parametrize("count", [1, 2, 3, 17, 18, 19, 34, 35])
def test_max_new_tokens(count):
    out = generate([ids_of("abcde"), ids_of("ab")], max_new_tokens=count)
    assert out.texts == [expected(5, count), expected(2, count)]
    assert out.tokens == [ids_of(text) for text in out.texts]
    assert out.stats.new_tokens == (count, count)
    assert out.state.next_position.tolist() == [5 + count - 1, 2 + count - 1]


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("count", [1, 17, 20])
def test_every_policy_counts_alike(policy, count):
    out = generate([ids_of("abcde")], policy=policy, max_new_tokens=count)
    assert out.texts == [expected(5, count)]


def test_streamed_pieces_are_the_text():
    yielded, out = pieces([ids_of("abcde"), ids_of("ab")], max_new_tokens=40)
    assert [len(rows) for rows in yielded] == [2] * len(yielded)
    assert [rows[0] for rows in yielded[:3]] == [expected(5, 1), expected(6, 1), expected(7, 16)]
    assert ["".join(row) for row in zip(*yielded, strict=True)] == out.texts
    assert out.texts == [expected(5, 40), expected(2, 40)]


def test_streaming_begins_with_the_first_token():
    chunks = ikv.stream(LM, [ids_of("abcde")], max_new_tokens=40)
    assert next(chunks) == [expected(5, 1)]
    chunks.close()


def test_characters_across_chunks_are_held_back():
    """Chunks end behind 1, 2, 18 and 34 tokens, mostly within a character."""
    script, starts = "x€😀" * 20, (8, 9, 12, 16)
    options = {"lm": language_model(script), "max_new_tokens": 36}
    yielded, out = pieces([ids_of("a" * start) for start in starts], **options)
    assert ["".join(row) for row in zip(*yielded, strict=True)] == out.texts
    for start, text in zip(starts, out.texts, strict=True):
        assert text == script.encode()[start : start + 36].decode(errors="replace")
    assert "\ufffd" not in "".join("".join(rows) for rows in yielded[:-1])


# Ends


def test_end_token_ends_a_row():
    """The script ends at position 12; the second row gets there later."""
    lm = language_model([*ids_of("abcdefghijkl"), EOS, *ids_of("mno")])
    yielded, out = pieces([ids_of("12345678"), ids_of("123")], lm=lm, max_new_tokens=30)
    assert out.texts == ["ijkl", "defghijkl"]
    assert out.tokens == [[*ids_of("ijkl"), EOS], [*ids_of("defghijkl"), EOS]]
    assert out.stats.new_tokens == (5, 10)
    assert ["".join(row) for row in zip(*yielded, strict=True)] == out.texts
    assert len(yielded) == 4  # first token, step 1, one chunk, the rest; then all rows are done
    assert out.state.finished.tolist() == [True, True]
    assert out.state.next_position.tolist() == [12, 12]


def test_end_token_may_come_first():
    lm = language_model([*ids_of("abcdefgh"), EOS, *ids_of("ijk")])
    out = generate([ids_of("12345678"), ids_of("123456")], lm=lm, max_new_tokens=30)
    assert out.texts == ["", "gh"]
    assert out.tokens == [[EOS], [*ids_of("gh"), EOS]]
    alone = generate([ids_of("12345678")], lm=lm, max_new_tokens=30)
    assert (alone.texts, alone.tokens) == ([""], [[EOS]])
    assert alone.state.next_position.tolist() == [8]


def test_end_tokens_can_be_ignored():
    lm = language_model([*ids_of("abcdefgh"), EOS, *ids_of("ijk")])
    out = generate([ids_of("123456")], lm=lm, max_new_tokens=6, stop_at_eos=False)
    assert out.texts == ["ghijk"]
    assert out.tokens == [[*ids_of("gh"), EOS, *ids_of("ijk")]]


@pytest.mark.parametrize(
    ("stop", "texts"),
    [
        (["told"], ["d as it was ", "ce there was a model that did as it was "]),
        (
            ["zebra", " told, to", "told,!"],
            ["d as it was", "ce there was a model that did as it was"],
        ),
        (["o", "told"], ["d as it was t", "ce there was a m"]),
    ],
)
def test_stop_strings(stop, texts):
    """Also that tokens end with the stop string, and how many there are."""
    yielded, out = pieces([ids_of("a" * 30), ids_of("ab")], stop=stop, max_new_tokens=60)
    assert out.texts == texts
    assert ["".join(row) for row in zip(*yielded, strict=True)] == texts
    completed = " told, to" if " told, to" in stop else stop[0]
    assert out.tokens == [ids_of(text + completed) for text in texts]
    assert out.stats.new_tokens == tuple(map(len, out.tokens))


def test_stop_string_that_never_comes():
    out = generate([ids_of("abcde")], stop=["told!"], max_new_tokens=50)
    assert out.texts == [expected(5, 50)]


# Prompts


def test_what_a_prompt_may_be():
    lm = dataclasses.replace(LM, tokenizer=LM.tokenizer)
    lm.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}]
    prompts = ["ab", chat, [5, 6, 7], np.array([8, 9])]
    assert encode_prompts(lm, prompts) == [
        ids_of("ab"),
        ids_of("<user>hi<assistant>"),
        [5, 6, 7],
        [8, 9],
    ]
    assert encode_prompts(lm, prompts, "Q:") == [
        ids_of("abQ:"),
        ids_of("<user>hi<assistant>Q:"),
        [5, 6, 7, *ids_of("Q:")],
        [8, 9, *ids_of("Q:")],
    ]


def test_text_is_continued_where_the_answer_prefix_ends():
    out = generate(["ab"], answer_prefix="cde", max_new_tokens=8)
    assert out.texts == [expected(5, 8)]
    assert out.stats.prompt_tokens == (5,)


# Statistics


def test_statistics():
    """Rows of 40 and 10 tokens of which a quarter stays; 20 new tokens, the last not cached."""
    out = generate([ids_of("a" * 40), ids_of("a" * 10)], ratio=0.75, max_new_tokens=20)
    stats = out.stats
    assert stats.prompt_tokens == (40, 10)
    assert stats.new_tokens == (20, 20)
    assert stats.kept_tokens == (10, 2)
    assert stats.evicted == (40 + 19 - 10, 10 + 19 - 2)
    assert TOKEN_BYTES == 32
    assert stats.kv_bytes_full == (59 + 29) * 32
    assert stats.kv_bytes_kept == 12 * 32
    assert stats.kv_bytes_allocated == 2 * 64 * 32  # two rows of 64 slots
    assert stats.prefill_s > 0
    assert stats.decode_tokens_per_s > 0
    assert out.state.num_held.tolist() == [10, 2]


def test_statistics_of_the_full_cache():
    stats = generate([ids_of("a" * 40)], policy="full", max_new_tokens=30).stats
    assert (stats.kept_tokens, stats.evicted) == ((69,), (0,))
    assert stats.kv_bytes_full == stats.kv_bytes_kept == 69 * 32
    assert stats.kv_bytes_allocated == 128 * 32


def test_statistics_of_a_single_token():
    """Nothing is decoded, so nothing is evicted either."""
    stats = generate([ids_of("a" * 40)], max_new_tokens=1).stats
    assert (stats.kept_tokens, stats.evicted, stats.new_tokens) == ((40,), (0,), (1,))
    assert stats.decode_tokens_per_s == 0.0


def test_policies_by_value():
    policy = policies.lazy(2, tokens=7, protect_first=3)
    out = generate([ids_of("a" * 40)], policy=policy, max_new_tokens=20)
    assert out.stats.kept_tokens == (7,)
    positions = np.asarray(out.state.positions)[np.asarray(out.state.valid)]
    assert {0, 1, 2} <= set(positions.tolist())


# Sampling


def test_seeds():
    """A model without an opinion: every token is a draw."""
    lm = language_model("", sharpness=0.0)
    options = {"lm": lm, "sampling": ikv.Sampling(), "max_new_tokens": 20}
    first = generate([ids_of("abc")], seed=1, **options)
    assert generate([ids_of("abc")], seed=1, **options).tokens == first.tokens
    assert generate([ids_of("abc")], seed=2, **options).tokens != first.tokens
    assert len(set(first.tokens[0])) > 10
    options |= {"lm": LM, "sampling": ikv.Sampling(top_k=1)}
    assert generate([ids_of("abc")], **options).texts == [expected(3, 20)]


# Errors


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("one string", {}, "prompts must be a list of prompts, got one string; write [prompt]"),
        ([], {}, "the batch is empty: give at least one prompt"),
        ([""], {}, "prompt 0 is empty"),
        (["a", []], {}, "prompt 1 is empty"),
        (["a", np.array([], int)], {}, "prompt 1 is empty"),
        ([[5, 300]], {}, "prompt 0 has token ids 5 .. 300, outside the vocabulary 0 .. 299"),
        ([[-1, 5]], {}, "prompt 0 has token ids -1 .. 5, outside the vocabulary 0 .. 299"),
        ([[{"role": "user", "content": "hi"}]], {}, "scripted has no chat template"),
        ({"role": "user", "content": "hi"}, {}, "prompts must be a list of prompts, got a dict"),
        ([{"role": "user", "content": "hi"}], {}, "got one chat; write [chat]"),
        (iter(["a"]), {}, "prompts must be a list of prompts, got a "),
        (["a", None], {}, "prompt 1: expected a text, a chat or a list of token ids, got None"),
        ([3, 4], {}, "prompt 0: expected a text, a chat or a list of token ids, got 3"),
        ([[1.5, 2.5]], {}, "prompt 0: token ids must be a flat list of integers, got [1.5, 2.5]"),
        ([["a", "b"]], {}, "prompt 0: token ids must be a flat list of integers, got ['a', 'b']"),
        ([[[3], [4]]], {}, "prompt 0: token ids must be a flat list of integers"),
        (["\ud800"], {}, "prompt 0: the text is not valid Unicode"),
        (
            [[{"role": "user", "text": "hi"}]],
            {},
            "prompt 0: a message must have strings \"role\" and \"content\", got {'role': 'user'",
        ),
        ([[{"role": "user", "content": "hi"}, "hello"]], {}, "\"content\", got 'hello'"),
        (["a"], {"policy": "h3o"}, "unknown policy 'h3o'; expected one of: full, inertiakv,"),
        (["a"], {"policy": 3}, "policy must be a name or a Policy, got 3"),
        (["a"], {"ratio": 1.0}, "ratio must be a number in [0, 1), got 1.0"),
        (["a"], {"ratio": -1}, "ratio must be a number in [0, 1), got -1"),
        (["a"], {"policy": policies.lazy(4), "ratio": 0.5}, "ratio=0.5 is set by the policy given"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (
            ["a" * 250],
            {"max_new_tokens": 7},
            "a prompt of 250 tokens and 7 new ones exceed the model's 256 positions",
        ),
        (["a"], {"answer_prefix": 5}, "answer_prefix must be a text, got 5"),
        ([[1]], {"answer_prefix": "\ud800"}, "prompt 0: the text is not valid Unicode"),
        (["a"], {"stop": "END"}, "stop must be a list of strings, got one string; write ['END']"),
        (["a"], {"stop": [""]}, "stop must hold non-empty strings, got ['']"),
        (["a"], {"stop": [5]}, "stop must hold non-empty strings, got [5]"),
        (["a"], {"stop": None}, "stop must be a list of strings, got None"),
        (["a"], {"max_new_tokens": None}, "max_new_tokens must be an integer, got None"),
        (["a"], {"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got 2.5"),
        (["a"], {"sampling": 0.7}, "sampling must be a Sampling or None (greedy), got 0.7"),
        (
            ["a"],
            {"sampling": ikv.Sampling(), "seed": 2**63},
            "seed must be an integer of 64 bits, got 9223372036854775808",
        ),
        (["a"], {"sampling": ikv.Sampling(), "seed": 0.5}, "seed must be an integer of 64 bits"),
        (
            ["a"],
            {"policy": policies.learned(scorer_weights="nowhere")},
            "no scorer weights at 'nowhere'",
        ),
        (
            ["a"],
            {"policy": policies.inertiakv(layer_weights=(1.0, 2.0, 3.0, 4.0, 5.0))},
            "layer_weights has 5 numbers, but the model has",
        ),
        (
            ["a"],
            {"policy": policies.lazy(4, tokens=3, protect_first=4)},
            "protect_first=4 and protect_recent=0 must fit the smallest budget",
        ),
    ],
)
def test_bad_arguments(prompts, options, message):
    """Raised by the call itself, not by the first look at the generator."""
    lm = language_model(TEXT)
    with compiled_programs() as names:
        with pytest.raises(ValueError, match=re.escape(message)):
            ikv.stream(lm, prompts, **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            ikv.generate(lm, prompts, **options)
    assert names == []


def test_mesh_that_is_a_text():
    lm = dataclasses.replace(LM, mesh="data=1")
    with pytest.raises(ValueError, match=r"got 'data=1'; write make_mesh\('data=1'\)"):
        generate(["a"], lm=lm)


@pytest.mark.parametrize("policy", ["full", "lazy4"])
def test_nan_weights(policy):
    lm = dataclasses.replace(LM, params=LM.params | {"sharpness": jnp.float32(np.nan)})
    with pytest.raises(FloatingPointError, match=r"logits of rows \[0, 1\] hold NaN .* \[2, 1\]"):
        generate(["ab", "a"], lm=lm, policy=policy)


def test_nan_that_comes_later():
    """The script turns to NaN at position 9, which only the first row reaches."""
    script = LM.params["script"].at[9].set(jnp.nan)
    lm = dataclasses.replace(LM, params=LM.params | {"script": script})
    with pytest.raises(FloatingPointError, match=r"logits of rows \[0\] hold NaN"):
        generate([ids_of("a" * 6), ids_of("a")], lm=lm, max_new_tokens=6)
