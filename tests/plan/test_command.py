"""``inertiakv plan``: two small programs compiled for a real chip, the tables, and the errors."""

import json

import pytest
from aot.compile_ahead import skip_unless_installed
from weights.tiny_files import LLAMA

from inertiakv_jax import cli
from inertiakv_jax.commands import plan_report
from inertiakv_jax.plan import child, planning

CONFIG = LLAMA | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def run(capsys, *arguments):
    capsys.readouterr()
    code = cli.run(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.mark.aot
def test_a_plan(model, capsys):
    skip_unless_installed("v5e")
    arguments = (
        *(model, "--topology", "v5e:2x2", "--mesh", "data=2,model=2", "--policy", "full"),
        *("--batch", 3, "--context", 256, "--new-tokens", 56, "--json"),
    )
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    plan = json.loads(out)
    assert plan["slots"] == {"full": 256, "start": 256, "kept": None}
    assert plan["padded_batch"] == 4
    # 512 * 256 of embedding, 256 * (2 * 256 + 2 * 128 + 3 * 512) of a layer, halves; nine norms.
    weights = (512 * 256 + 4 * 256 * 2_304) * 2 // 2 + 9 * 256 * 2
    assert plan["bytes_per_device"]["weights"] == weights
    prefill, step = plan["phases"]
    assert (prefill["name"], step["name"]) == ("prefill", "decode step")
    # A sum after attention and one after the MLP: 2 rows of 256 numbers, or of 256 tokens each.
    assert prefill["collectives"]["all-reduce"]["count"] >= 8
    assert prefill["collectives"]["all-reduce"]["bytes"] >= 8 * 2 * 256 * 256 * 2
    # Of the embedding, too, to which tokens are looked up in halves.
    assert step["collectives"]["all-reduce"]["count"] >= 9
    assert step["collectives"]["all-reduce"]["bytes"] >= 9 * 2 * 256 * 2
    for phase in plan["phases"]:
        assert phase["fits"]
        assert phase["total"] >= weights + phase["full_cache"]
    whole = json.loads(run(capsys, *arguments, "--whole")[1])
    assert (plan["compiled_layers"], whole["compiled_layers"]) == ([1, 2], [4])
    for phase, all_layers in zip(plan["phases"], whole["phases"], strict=True):
        assert phase["collectives"] == all_layers["collectives"]
        assert phase["weights"] == all_layers["weights"]
        # What fits on the chip is placed anew in each program, and from run to run: 0.25 MiB.
        assert phase["temporaries"] == pytest.approx(all_layers["temporaries"], abs=1 << 20)
    plan_report.print_plan(plan)
    shown = capsys.readouterr().out
    assert "on v5e:2x2, mesh data=2,model=2: 3 rows of 256 tokens, full" in shown
    assert "the batch is padded from 3 to 4 rows" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "v7x:2x2"], "unknown topology 'v7x:2x2'; known are\n  v5e:1x1 v5e:2x2"),
        ([], "unknown topology ''; known are"),
        (["--topology", "v5e:2x4", "--mesh", "model=4"], "has 4 devices, but v5e:2x4 has 8"),
        (["--search", "--topology", "v5e:2x4"], "--search chooses the topology itself"),
    ],
)
def test_what_is_refused_before_a_process_starts(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(child, "run_plan", lambda *_: pytest.fail("started"))
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err


def test_a_compiler_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(child, "COMPILERS", dict.fromkeys(child.COMPILERS, ("no-such-compiler",)))
    code, _, err = run(capsys, "--topology", "h100:8")
    assert code == 2
    assert "compiling for h100:8 needs no-such-compiler: pip install 'inertiakv-jax[aot]'" in err


def test_an_error_of_the_process_is_the_command_s(capsys, monkeypatch):
    monkeypatch.setattr(child, "COMPILERS", dict.fromkeys(child.COMPILERS, ()))
    code, _, err = run(capsys, "no-such-model", "--topology", "h100:8")
    assert code == 2
    assert "no model 'no-such-model'; expected a catalogue name (gemma-2-2b, " in err


def test_a_process_that_dies(capsys, monkeypatch):
    monkeypatch.setattr(child, "COMPILERS", dict.fromkeys(child.COMPILERS, ()))
    monkeypatch.setattr(child.sys, "executable", "/bin/false")
    code, _, err = run(capsys, "--topology", "h100:8")
    assert code == 1
    assert "the compiler ended with exit code 1" in err


def test_the_configuration_of_a_folder(model):
    config = planning.find_config(model)
    assert (config.num_layers, config.hidden_size) == (4, 256)
    assert planning.find_config(f"{model}/config.json") == config


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.run(["plan", "--help"])
    assert "\n  inertiakv plan llama-3.1-8b --topology v5e:2x4" in capsys.readouterr().out
