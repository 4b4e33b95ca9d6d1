"""``inertiakv models``: the list, one of it, and what is refused."""

import json

import pytest

from inertiakv_jax import cli


def test_the_list(inertiakv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    outcome = inertiakv("models")
    assert (outcome.code, outcome.err) == (0, "")
    heading, *lines = outcome.out.splitlines()
    assert heading.split()[:3] == ["name", "family", "params"]
    rows = {line.split()[0]: line for line in lines if line[:1].isalpha()}
    llama = " ".join(rows["llama-3.1-8b"].split())
    # 2 * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB
    assert llama == (
        "llama-3.1-8b llama 8.0 B 32 32/8 x 128 131,072 128.0 KiB - "
        "meta-llama/Llama-3.1-8B-Instruct"
    )
    # All layers of Mistral v0.1 have a window: 32 * 4096 tokens * 2 * 8 * 128 * 2 bytes.
    assert rows["mistral-7b-v0.1"].split()[-4:-1] == ["-", "512.0", "MiB"]
    assert rows["gemma-3-270m"].split()[2:4] == ["268", "M"]


def test_one_model_as_json(inertiakv):
    [row] = json.loads(inertiakv("models", "qwen3-30b-a3b", "--json").out)
    assert row["experts"] == [8, 128]
    assert row["parameters"] == 30_532_122_624
    assert (row["query_heads"], row["kv_heads"], row["head_dim"]) == (32, 4, 128)
    assert (row["kv_bytes_per_token"], row["window_kv_bytes"]) == (98_304, 0)


def test_a_family(inertiakv):
    rows = json.loads(inertiakv("models", "--family", "gemma2", "--json").out)
    assert [row["name"] for row in rows] == ["gemma-2-2b", "gemma-2-9b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama"], "model 'llama' is not one of gemma-2-2b, "),
        (["--family", "gpt2"], "--family 'gpt2' is not one of llama, mistral"),
    ],
)
def test_unknown_names(inertiakv, arguments, words):
    outcome = inertiakv("models", *arguments)
    assert outcome.code == 2
    assert words in outcome.err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.run(["models", "--help"])
    assert "\n  inertiakv models\n" in capsys.readouterr().out
