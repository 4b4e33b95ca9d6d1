"""``inertiakv convert``: both formats, and what is refused before anything is loaded."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inertiakv_jax as ikv
from inertiakv_jax import checkpoint, cli


@pytest.mark.parametrize("target", ["orbax", "safetensors"])
def test_a_converted_model_is_the_same_model(inertiakv, tiny_model, tmp_path, target):
    if target == "orbax":
        pytest.importorskip("orbax.checkpoint", reason="needs orbax (extra 'checkpoint')")
    folder = tmp_path / "out"
    outcome = inertiakv("convert", tiny_model, folder, "--format", target)
    assert (outcome.code, outcome.out) == (0, "")
    assert f"{folder}: llama, " in outcome.err
    assert checkpoint.is_checkpoint(folder) == (target == "orbax")
    before, after = ikv.load(tiny_model, dtype="bfloat16"), ikv.load(folder, dtype="bfloat16")
    assert after.config == before.config
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    assert inertiakv("generate", "Hi", "--model", folder, "--max-new-tokens", "2").code == 0


def test_int8(inertiakv, tiny_model, tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="needs orbax (extra 'checkpoint')")
    outcome = inertiakv("convert", tiny_model, tmp_path / "out", "--quantize", "int8")
    assert outcome.code == 0
    lm = ikv.load(tmp_path / "out")
    assert lm.params["layers_0"]["mlp"]["up_proj"]["kernel"].dtype == jnp.int8
    assert lm.model.quantization == "int8"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quantize", "int8", "--format", "safetensors"], "--quantize needs --format orbax"),
        (["--quantize", "int4"], "quantize 'int4' is not supported"),
        (["--dtype", "float16"], "dtype 'float16' is not supported"),
    ],
)
def test_refused_before_anything_is_written(inertiakv, tiny_model, tmp_path, arguments, words):
    outcome = inertiakv("convert", tiny_model, tmp_path / "out", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(inertiakv, tmp_path):
    (tmp_path / "kept").write_text("1")
    outcome = inertiakv("convert", "no-such-model", tmp_path)
    assert outcome.code == 2
    assert "exists and is not an empty folder" in outcome.err


def test_a_target_in_a_file_is_named(inertiakv, tmp_path):
    (tmp_path / "file").touch()
    outcome = inertiakv("convert", "no-such-model", tmp_path / "file" / "out")
    assert outcome.code == 2
    assert f"the folder {tmp_path}/file cannot be made: it is a file" in outcome.err


def test_without_orbax(inertiakv, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    outcome = inertiakv("convert", tiny_model, tmp_path / "out")
    assert outcome.code == 2
    assert "pip install 'inertiakv-jax[checkpoint]'" in outcome.err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.run(["convert", "--help"])
    assert "\n  inertiakv convert smollm2-135m " in capsys.readouterr().out
