"""Tokenizers of GGUF files and folders: by hand, and against plain Python byte-level BPE."""

import json
import random

import pytest
from weights import byte_level_bpe, score_merging
from weights.tiny_files import (
    MERGES,
    tiny_vocabulary,
    write_folder,
    write_gguf,
    write_tokenizer_json,
)

from inertiakv_jax.weights.byte_level import PRE_TOKENIZERS
from inertiakv_jax.weights.gguf_file import open_gguf
from inertiakv_jax.weights.load import load
from inertiakv_jax.weights.tokenizer import gguf_tokenizer, hf_tokenizer

FRAGMENTS = [
    *(" ", "  ", "    ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u200b"),
    *("1", "12", "4567", "½", "٣", "Ⅷ", "x2", "3.14", "1,000"),
    *("don't", "I'LL", "we'Ve", "'s", "'", "the", " the", "The in", "Ünïcödé", "ß"),
    *("e\u0301", "é", "A\u030a", "\u212b", "ﬁ", "\u1112\u1161\u11ab", "한국어", "中文字", "日本語"),
    *("العربية", "हिन्दी", "\U0001f600", "👩‍👩‍👧", "🇩🇪", "…", "--", "+=", "<|x|>", "$%^~|"),
    *("def f(x):\n        return x ** 2", "{}[]();", "http://a.b/c?d=e_f", "\x00", "\ufeff"),
]


def tiny(tmp_path, pre, **options):
    metadata = {"tokenizer.ggml.pre": pre} | options.pop("metadata", {})
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata, **options)
    return gguf_tokenizer(open_gguf(path))


def ids(text):
    """Ids of single bytes in the tiny vocabulary: three control tokens come first."""
    return [3 + byte for byte in text.encode()]


MERGED = {merge.replace(" ", ""): 259 + i for i, merge in enumerate(MERGES)}


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # Digits: one at a time, one at a time, up to three, all.
        ("smollm", "12", ids("12")),
        ("qwen2", "12", ids("12")),
        ("llama-bpe", "12", [1, MERGED["12"]]),
        ("gpt-2", "12", [MERGED["12"]]),
        ("llama-bpe", "1212", [1, MERGED["12"], *ids("12")]),
        ("gpt-2", "1212", [MERGED["12"]] * 2),
        # "default" cuts digits in threes from the left: 091|2, not 09|12.
        ("default", "0912", ids("0912")),
        ("default", "912", [*ids("9"), MERGED["12"]]),
        # Two spaces before a digit: SmolLM2 cuts the digit off first and keeps the spaces together;
        # the others leave the last space to what follows.
        ("smollm", "a  7", [*ids("a"), MERGED["ĠĠ"], *ids("7")]),
        ("qwen2", "a  7", ids("a  7")),
        ("gpt-2", "a  7", ids("a  7")),
        ("smollm", "a  b", ids("a  b")),
        ("gpt-2", "a   b", [*ids("a"), MERGED["ĠĠ"], *ids(" b")]),
        # Normal form C joins e and the accent; the others keep three bytes.
        ("qwen2", "e\u0301", ids("\u00e9")),
        ("smollm", "e\u0301", [3 + 0x65, 3 + 0xCC, 3 + 0x81]),
        # A capital after small letters begins a piece.
        ("tekken", "theTHEin", [1, *ids("t"), MERGED["he"], *ids("THE"), MERGED["in"]]),
        ("tekken", "i", [1, *ids("i")]),
        ("gpt-2", " the the", [MERGED["Ġthe"]] * 2),
        ("smollm", "the", [*ids("t"), MERGED["he"]]),
        # Control tokens are taken from the text as they stand.
        ("smollm", "<|im_start|>in<|im_end|>", [1, MERGED["in"], 2]),
        ("smollm", "<|im_x|>", ids("<|im_x|>")),
    ],
)
def test_by_hand(tmp_path, pre, text, expected):
    tokenizer = tiny(tmp_path, pre)
    assert tokenizer(text).input_ids == expected
    if pre != "qwen2":
        assert tokenizer.decode(expected, skip_special_tokens=PRE_TOKENIZERS[pre].add_bos) == text


@pytest.mark.parametrize("pre", byte_level_bpe.RULES)
def test_against_plain_python(tmp_path, pre):
    tokenizer = tiny(tmp_path, pre)
    vocabulary = {token: index for index, token in enumerate(tiny_vocabulary()[0])}
    merges = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 8)))
        expected = byte_level_bpe.encode(text, pre, vocabulary, merges)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, repr(text)


def test_every_row_is_compared():
    assert {"llama3", "llama-v3", *byte_level_bpe.RULES} == set(PRE_TOKENIZERS)
    assert PRE_TOKENIZERS["llama3"] == PRE_TOKENIZERS["llama-v3"] == PRE_TOKENIZERS["llama-bpe"]


def test_whole_pieces_are_looked_up_first_in_llama3(tmp_path):
    tokens, types = tiny_vocabulary()
    tokens[280], types[280] = "xyz", 1  # no merge leads to it
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert tiny(tmp_path, "llama-bpe", metadata=metadata)("xyz").input_ids == [1, 280]
    assert tiny(tmp_path, "gpt-2", metadata=metadata)("xyz").input_ids == ids("xyz")


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("smollm", None, []),
        ("smollm", True, [1]),
        ("llama-bpe", None, [1]),
        ("llama-bpe", False, []),
    ],
)
def test_bos_by_flag_and_by_default(tmp_path, pre, flag, expected):
    metadata = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = tiny(tmp_path, pre, metadata=metadata)
    assert tokenizer("in").input_ids == [*expected, MERGED["in"]]
    assert tokenizer("in", add_special_tokens=False).input_ids == [MERGED["in"]]


def test_user_defined_tokens_are_matched_but_not_special(tmp_path):
    tokens, types = tiny_vocabulary()
    tokens[280], types[280] = "<tool>", 4
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = tiny(tmp_path, "smollm", metadata=metadata)
    assert tokenizer("a<tool>b").input_ids == [*ids("a"), 280, *ids("b")]
    assert tokenizer.decode([280, 2], skip_special_tokens=True) == "<tool>"


def test_special_tokens_and_chat_template(tmp_path):
    model = load(write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.padding_token_id": 0}))
    tokenizer = model.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token_id, tokenizer.unk_token) == (0, None)
    prompt = model.chat_prompt([{"role": "user", "content": "Hi"}])
    assert prompt == "<user>Hi<assistant>"
    with pytest.raises(ValueError, match="messages is empty"):
        model.chat_prompt([])


def test_model_without_a_chat_template(tmp_path):
    model = load(write_gguf(tmp_path / "m.gguf", drop=["tokenizer.chat_template"]))
    with pytest.raises(ValueError, match=r"m\.gguf has no chat template"):
        model.chat_prompt([{"role": "user", "content": "Hi"}])


def test_chat_template_that_fails(tmp_path):
    model = load(write_gguf(tmp_path / "m.gguf"))
    for template, message in (
        ("{{ raise_exception('no system messages') }}", "fails: no system messages"),
        ("{% for m in messages %}", "fails: Unexpected end of template"),
    ):
        model.tokenizer.chat_template = template
        with pytest.raises(ValueError, match=message):
            model.chat_prompt([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.ggml.pre": "bloom"}, "'bloom' is not supported; supported: smollm, qwen2"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.unknown_token_id is missing"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 0},
            "scores must be a list of float",
        ),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.unknown_token_id": 0,
                "tokenizer.ggml.scores": [0.0, 1.0],
            },
            "scores has 2 entries for 300 tokens",
        ),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "tokens has duplicates"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "token_type has 300 entries for 2 tokens"),
        ({"tokenizer.ggml.merges": ["Ġ t", "q z"]}, "merges has 'q z'"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "merges has 'nospace'"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges must be a list of str"),
        ({"tokenizer.ggml.bos_token_id": 300}, "bos_token_id 300 is not one of 300 tokens"),
    ],
)
def test_bad_metadata_is_named(tmp_path, metadata, words):
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{words}"):
        tiny(tmp_path, "smollm", metadata=metadata)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("tokenizer.ggml.pre", r"'\(none given\)' is not supported"),
        ("tokenizer.ggml.merges", "merges must be a list of str"),
        ("tokenizer.ggml.token_type", "token_type must be a list of int"),
    ],
)
def test_absent_metadata_is_named(tmp_path, key, words):
    path = write_gguf(tmp_path / "m.gguf", drop=[key])
    with pytest.raises(ValueError, match=words):
        gguf_tokenizer(open_gguf(path))


def test_bos_flag_without_a_bos_token(tmp_path):
    metadata = {"tokenizer.ggml.add_bos_token": True}
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata, drop=["tokenizer.ggml.bos_token_id"])
    with pytest.raises(ValueError, match="add_bos_token without a bos_token_id"):
        gguf_tokenizer(open_gguf(path))


# --- SentencePiece --------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
# Scores fall with the piece's number, as BPE learned them; "aab" can be cut in two places.
PIECES = [
    *("ab", "aa", "aab", "\u2581a", "\u2581ab", "the", "th", "he", "\u2581the", "\u2581t", "aaa"),
    *(
        "bb",
        "abb",
        "--",
        "----",
        "---",
        "\u2581",
        "a",
        "b",
        "t",
        "h",
        "e",
        "-",
        "é",
        "\u2581\u2581",
    ),
]
MATCHED = ["  ", "   ", "\n", "\n\n", "<b>"]


def sentencepiece_tokens():
    """Tokens, types, scores."""
    rows = [("<pad>", CONTROL, 0.0), ("<eos>", CONTROL, 0.0), ("<bos>", CONTROL, 0.0)]
    rows += [("<unk>", UNKNOWN, 0.0), *((token, USER, -1000.0) for token in MATCHED)]
    rows += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    rows += [(piece, NORMAL, -float(rank)) for rank, piece in enumerate(PIECES)]
    return [list(column) for column in zip(*rows, strict=True)]


def sentencepiece(tmp_path, **metadata):
    tokens, types, scores = sentencepiece_tokens()
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        **metadata,
    }
    path = write_gguf(
        tmp_path / "m.gguf", metadata={f"tokenizer.ggml.{key}": v for key, v in keys.items()}
    )
    return gguf_tokenizer(open_gguf(path))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # "ab" is joined first although "aa" stands first; "a" and "ab" make the next.
        ("aab", ["aab"]),
        ("aabb", ["aab", "b"]),
        ("the", ["the"]),
        (" the", ["\u2581the"]),
        # Runs of spaces are matched before anything is joined.
        ("a  the", ["a", "  ", "the"]),
        ("a     the", ["a", "   ", "  ", "the"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),
        ("<b>a</b>", ["<b>", "a", "<0x3C>", "<0x2F>", "b", "<0x3E>"]),
        ("x", ["<0x78>"]),
        ("日é", ["<0xE6>", "<0x97>", "<0xA5>", "é"]),
        ("<eos>a", ["<eos>", "a"]),
        ("-----", ["----", "-"]),
        ("", []),
    ],
)
def test_sentencepiece_by_hand(tmp_path, text, pieces):
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False)
    encoded = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(encoded) == ["<bos>", *pieces]
    assert tokenizer.decode(encoded[1:]) == text


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_against_plain_python(tmp_path, prefix):
    tokenizer = sentencepiece(tmp_path, add_space_prefix=prefix, add_bos_token=False)
    scores = {piece: -float(rank) for rank, piece in enumerate(PIECES)}
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(
            rng.choices([*"aabbthe- \né", "  ", "aab", "<b>", "日"], k=rng.randint(1, 12))
        )
        expected = score_merging.encode(text, scores, MATCHED, prefix)
        got = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(got) == expected, repr(text)
        if not prefix:  # one before a later stretch can't be told from a space of the text
            assert tokenizer.decode(got) == text


def test_prefix_is_the_default(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("the").input_ids)
    assert tokens == ["<bos>", "\u2581the"]
    for text in ("the", " the", " a", "日"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


# --- folders --------------------------------------------------------------------------------------


def test_tokenizer_json_is_followed_whatever_class_the_folder_names(tmp_path):
    # The folder names GPT2Tokenizer, as SmolLM2's does; its tokenizer.json splits digits.
    digits = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        ],
    }
    write_tokenizer_json(tmp_path, digits)
    tokenizer = hf_tokenizer(tmp_path, "llama")
    assert tokenizer("a  12").input_ids == [*ids("a"), MERGED["ĠĠ"], *ids("12")]
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("family", "padding", "expected"),
    [
        ("mistral", 100_000, [*"aB", "the"]),
        ("mistral", 0, ["aB", "the"]),
        ("llama", 100_000, ["aB", "the"]),
    ],
)
def test_split_of_mistral_models_that_were_published_with_another(
    tmp_path, capfd, family, padding, expected
):
    write_tokenizer_json(
        tmp_path,
        {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": r"\\p{L}+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
    )
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for token in ("aB", "the", *(f"[{i}]" for i in range(padding))):
        vocabulary[token] = len(vocabulary)
    content["model"]["merges"] = ["a B", "h e", "t he"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = hf_tokenizer(tmp_path, family)
    assert capfd.readouterr().err == ""
    assert tokenizer.convert_ids_to_tokens(tokenizer("aBthe").input_ids) == expected


def test_code_in_a_folder_is_never_run(tmp_path):
    folder = write_folder(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "evil.Evil"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "was-run"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    with pytest.warns(UserWarning, match="no effect here: auto_map"):
        model = load(folder)
    assert model.tokenizer("12").input_ids == [MERGED["12"]]
    assert not mark.exists()


def test_broken_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot load its tokenizer"):
        hf_tokenizer(tmp_path, "llama")


# --- the real thing -------------------------------------------------------------------------------


@pytest.mark.real_weights
def test_smollm2_against_plain_python(smollm2):
    backend = json.loads(smollm2.tokenizer.backend_tokenizer.to_str())["model"]
    merges = {tuple(pair): rank for rank, pair in enumerate(backend["merges"])}
    assert (len(backend["vocab"]), len(merges)) == (49152, 48900)
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 8)))
        expected = byte_level_bpe.encode(text, "smollm", backend["vocab"], merges)
        assert smollm2.tokenizer(text).input_ids == expected, repr(text)
        assert smollm2.tokenizer.decode(expected) == text


@pytest.mark.real_weights
@pytest.mark.shared
def test_smollm2_counts_tokens_as_ruler_did(smollm2, shared_dir):
    """RULER stores each prompt's length, counted with SmolLM2's tokenizer, plus room to answer."""
    room = {"niah": 128, "cwe": 120, "fwe": 50, "qa": 32, "vt": 30}
    paths = sorted((shared_dir / "data/ruler/official_2048_smollm2").glob("*.jsonl"))
    assert len(paths) == 12
    for path in paths:
        for line in path.read_text().splitlines()[:3]:
            row = json.loads(line)
            tokens = smollm2.tokenizer(row["input"] + row["answer_prefix"]).input_ids
            assert len(tokens) + room[path.stem.split("_")[0]] == row["length"]


@pytest.mark.real_weights
def test_smollm2_chat_prompt(smollm2):
    prompt = smollm2.chat_prompt([{"role": "user", "content": "Hi 42"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = smollm2.tokenizer(prompt, add_special_tokens=False).input_ids
    assert tokens.count(1) == 3
    assert tokens.count(2) == 2
    assert smollm2.eos_token_ids == (2, 0)
