"""``inertiakv generate``: where the prompt comes from, what is printed, and what is refused."""

import io
import json
import sys

import pytest
from cli.conftest import CONFIG, write_model

import inertiakv_jax as ikv

PROMPT = "the thin in the 12"


@pytest.fixture(scope="module")
def lm(tiny_model):
    return ikv.load(tiny_model)


@pytest.fixture
def stdin(monkeypatch):
    def put(content: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return put


@pytest.fixture
def generate(inertiakv, tiny_model):
    def run_it(*arguments):
        return inertiakv("generate", "--model", tiny_model, "--max-new-tokens", 8, *arguments)

    return run_it


def test_prompt_as_argument_goes_through_the_chat_template(generate, lm):
    chat = [{"role": "user", "content": PROMPT}]
    expected = ikv.generate(lm, [chat], policy="lazy4", ratio=0.5, max_new_tokens=8)
    done = generate(PROMPT, "--policy", "lazy4", "--ratio", 0.5)
    assert done.code == 0
    assert done.out == expected.texts[0] + "\n"
    assert len(done.out) > 3


def test_raw_prompt_is_continued_as_it_is(generate, lm):
    expected = ikv.generate(lm, [PROMPT], policy="full", max_new_tokens=8)
    assert generate(PROMPT, "--raw", "--policy", "full").out == expected.texts[0] + "\n"


def test_model_without_chat_template_continues_the_text(inertiakv, tmp_path):
    folder = write_model(tmp_path / "base", chat=False)
    expected = ikv.generate(ikv.load(folder), [PROMPT], policy="full", max_new_tokens=4)
    options = ["--policy", "full", "--max-new-tokens", 4]
    done = inertiakv("generate", PROMPT, "--model", folder, *options)
    assert (done.code, done.out) == (0, expected.texts[0] + "\n")


def test_prompt_from_file_and_from_stdin(generate, stdin, tmp_path):
    expected = generate(PROMPT).out
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert generate("--file", file).out == expected
    stdin(PROMPT.encode())
    assert generate("-").out == expected
    stdin(PROMPT.encode())
    assert generate("--file", "-").out == expected


def test_file_comes_before_the_prompt(generate, stdin, tmp_path):
    expected = generate("the text\n\nthe question").out
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfthe text\n")  # with a byte order mark and a last line's end
    assert generate("the question", "--file", file).out == expected
    stdin(b"the question")
    assert generate("-", "--file", file).out == expected


def test_statistics_are_aligned_on_stderr(generate):
    done = generate(PROMPT, "--raw", "--tokens", 6)
    loading, reading, *lines = done.err.splitlines()
    assert loading.startswith("Loading ")
    assert reading == "Reading 10 tokens; the first run of a shape compiles"
    rows = {line.split()[0]: line for line in lines}
    # t he | Ġt h in | Ġ in | Ġthe | Ġ 12
    assert rows["prompt"].split()[1] == "10"
    assert rows["new"].split()[1] == "8"
    assert rows["kept"].split()[1:] == ["6", "tokens,", "11", "evicted"]
    numbers_end = [line.index(line.split()[1]) + len(line.split()[1]) for line in rows.values()]
    assert len(set(numbers_end[1:4])) == 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--policy", "lazy4", "--ratio", 0.9], 1),
        (["--policy", "snapkv,window=1", "--ratio", 0.5], 5),
        (["--policy", "full"], None),
        (["--policy", "lazy4,tokens=9"], None),
        (["--policy", "lazy4", "--ratio", 0.9, "--json"], None),
    ],
)
def test_few_tokens_that_a_ratio_leaves_are_told(options, kept, generate):
    """The prompt has ten."""
    done = generate(PROMPT, "--raw", *options)
    assert done.code == 0, done.err
    said = f"Keeps {kept} of the prompt's 10 tokens: a ratio is meant for long prompts. "
    assert ("Keeps " in done.err) is (kept is not None)
    assert kept is None or said in done.err


def test_enough_tokens_go_without_a_word(generate):
    assert "Keeps 31 of" in generate("h" * 62, "--raw", "--ratio", 0.5).err
    assert "Keeps" not in generate("h" * 64, "--raw", "--ratio", 0.5).err


def test_json_is_one_object_and_nothing_else(generate):
    plain = generate(PROMPT, "--ratio", 0.5)
    done = generate(PROMPT, "--ratio", 0.5, "--json")
    result = json.loads(done.out)
    assert done.err == ""
    assert result["text"] + "\n" == plain.out
    assert len(result["tokens"]) == 8
    assert result["policy"]["name"] == "inertiakv"
    assert result["policy"]["ratio"] == 0.5
    assert result["dtype"] == "float32"
    stats = result["stats"]
    kept = stats["prompt_tokens"] - -(-stats["prompt_tokens"] // 2)
    assert stats["kept_tokens"] == kept
    assert stats["evicted"] == stats["prompt_tokens"] + 7 - kept
    assert stats["kv_bytes_kept"] == kept * 2 * 2 * 2 * 16 * 4  # keys and values, L, K, D, float32
    assert stats["prefill_s"] > 0


def test_stream_prints_the_same_text(generate):
    assert generate(PROMPT, "--stream").out == generate(PROMPT).out


def test_stop_text_is_not_printed(generate):
    text = generate(PROMPT, "--raw").out.rstrip("\n")
    done = generate(PROMPT, "--raw", "--stop", "never there", "--stop", text[3:5])
    assert done.out == text[: text.index(text[3:5])] + "\n"


def test_draws_depend_on_the_seed_alone(generate):
    options = [PROMPT, "--temperature", 5.0, "--top-k", 200, "--top-p", 0.99, "--min-p", 0.001]
    first = generate(*options, "--seed", 1).out
    assert generate(*options, "--seed", 1).out == first
    assert generate(*options, "--seed", 2).out != first


def test_policy_options_reach_the_policy(generate):
    options = ["--alpha", 0.3, "--protect-first", 2, "--protect-recent", 3, "--tokens", 9]
    policy = json.loads(generate(PROMPT, "--json", *options).out)["policy"]
    assert policy == {
        "name": "inertiakv",
        "ratio": None,
        "tokens": 9,
        "kv_bytes": None,
        "ratio_of": "prompt",
        "scorer": "attention",
        "retention": "shared",
        "alpha": 0.3,
        "decay": None,
        "layer_weights": "sequential",
        "refresh": 1,
        "protect_first": 2,
        "protect_recent": 3,
        "recent_fraction": 0.0,
        "seed": 0,
        "scorer_weights": None,
        "prompt_queries": 0,
        "prefill": None,
    }


def test_methods_and_their_options_behind_commas(generate):
    policy = json.loads(generate(PROMPT, "--json", "--policy", "tova,decay=0.5").out)["policy"]
    assert (policy["name"], policy["decay"], policy["retention"]) == ("tova", 0.5, "per_layer")
    policy = json.loads(generate(PROMPT, "--json", "--policy", "snapkv,window=4").out)["policy"]
    assert (policy["prefill"]["window"], policy["prefill"]["ratio"]) == (4, 0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--policy", "best"], "unknown policy 'best'; expected one of: full, inertiakv"),
        (["x", "--ratio", "1.5"], "ratio must be a number in [0, 1), got 1.5"),
        (["x", "--ratio", "0.5", "--tokens", "3"], "exactly one of ratio, tokens, kv_bytes"),
        (["x", "--tokens", "0"], "tokens must be an integer >= 1, got 0"),
        (["x", "--alpha", "1"], "alpha must be a number in [0, 1), got 1.0"),
        ([], "the prompt is empty: give a text, --file PATH, or - for standard input"),
        ([" \n"], "the prompt is empty"),
        (["\udcff"], "the prompt is not valid UTF-8"),
        (["--file", "none.txt"], "cannot read --file none.txt: No such file"),
        (["-", "--file", "-"], "standard input (-) can be the file or the prompt, not both"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["x" * 2050], "exceed the model's 2048 positions"),
        (["x", "--temperature", "-1"], "temperature must be above 0 and finite, got -1.0"),
        (["x", "--top-k", "5"], "--top-k needs --temperature above 0"),
        (["x", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["x", "--json", "--stream"], "--stream and --json cannot be combined"),
        (["x", "--dtype", "int8"], "dtype 'int8' is not supported; supported: float32, bfloat16"),
        (["x", "--model", "no/where/at/all"], "'no/where/at/all' does not exist; expected"),
        (["x", "--protect-first", "99"], "must fit the smallest budget"),
        (["x", "--mesh", "model=8"], "mesh 'model=8' needs 8 devices, but there are 1"),
    ],
)
def test_bad_input_is_one_line_and_code_2(generate, arguments, message):
    done = generate(*arguments)
    assert done.code == 2
    assert done.out == ""
    *before, line = done.err.splitlines()
    assert all(other.startswith(("Loading ", "Reading ", "Keeps ")) for other in before)
    assert line.startswith("error: ")
    assert message in line


def test_text_that_is_not_utf8_is_refused(generate, stdin, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes("é".encode("latin-1"))
    assert f"error: {file} is not valid UTF-8" in generate("--file", file).err
    stdin(b"\xff")
    assert "error: standard input is not valid UTF-8" in generate("-").err


def test_empty_stdin_is_refused(generate, stdin):
    stdin(b"")
    done = generate("-")
    assert (done.code, done.err) == (2, "error: the prompt is empty\n")


def test_folder_without_weights_is_refused(inertiakv, tmp_path):
    done = inertiakv("generate", "x", "--model", tmp_path)
    assert done.code == 2
    assert "has no config.json" in done.err


def test_logits_that_are_no_numbers_end_with_code_1(inertiakv, tmp_path):
    folder = write_model(tmp_path / "broken", CONFIG, nan_in="model.norm.weight")
    done = inertiakv("generate", "x", "--model", folder)
    assert done.code == 1
    assert "\nerror: the logits of rows [0] hold NaN" in done.err
    assert done.out == ""
