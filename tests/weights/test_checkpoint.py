"""Orbax checkpoints: written, restored in any dtype, and refused when they do not fit."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights.tiny_files import LLAMA, write_folder

import inertiakv_jax as ikv
from inertiakv_jax import checkpoint

pytest.importorskip("orbax.checkpoint", reason="needs orbax (extra 'checkpoint')")

MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model and its checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    lm = ikv.load(write_folder(folder / "source", MOE))
    checkpoint.save(lm, folder / "out")
    return lm, folder / "out"


def test_a_model_comes_back(written):
    lm, folder = written
    again = ikv.load(folder)
    assert again.model == lm.model
    assert again.tokenizer("a 12 the").input_ids == lm.tokenizer("a 12 the").input_ids
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    [device] = {leaf.device for leaf in jax.tree.leaves(again.params)}
    assert device == jax.devices()[0]


def test_another_dtype(written):
    lm, folder = written
    half = ikv.load(folder, dtype="bfloat16")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)),
        half.params,
        lm.params,
    )


def test_int8_comes_back_as_int8(tmp_path):
    lm = ikv.load(write_folder(tmp_path / "source"), quantize="int8", dtype="bfloat16")
    checkpoint.save(lm, tmp_path / "out")
    again = ikv.load(tmp_path / "out", dtype="bfloat16")
    assert again.model == lm.model
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert again.params["layers_0"]["mlp"]["up_proj"]["kernel"].dtype == jnp.int8


def test_floats_are_not_quantised_on_the_way(written):
    with pytest.raises(ValueError, match=r"weights that are not int8: .* convert --quantize int8"):
        ikv.load(written[1], quantize="int8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 64}, r"params: parameter .* has shape \(.*the config asks for \("),
        ({"num_hidden_layers": 3}, r"params has no 12 parameters: layers_2/attention/k_norm"),
        (
            {"num_hidden_layers": 1},
            r"has, and the config does not ask for, 12 parameters: layers_1",
        ),
    ],
)
def test_a_config_of_another_model(written, tmp_path, change, words):
    folder = tmp_path / "out"
    shutil.copytree(written[1], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=words):
        ikv.load(folder)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({"format": 2}, "format 2, expected 1"),
        ({"quantization": "int4"}, "quantize 'int4' is not supported"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
    ],
)
def test_descriptions_that_are_none(written, tmp_path, description, words):
    folder = tmp_path / "out"
    shutil.copytree(written[1], folder)
    known = json.loads((folder / "inertiakv.json").read_text())
    (folder / "inertiakv.json").write_text(json.dumps(known | description))
    with pytest.raises(ValueError, match=rf"inertiakv\.json: {words}"):
        ikv.load(folder)


def test_a_damaged_checkpoint(written, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(written[1], folder)
    for path in (folder / "params").iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(ValueError, match=r"params (is not a complete|cannot be)"):
        ikv.load(folder)
    shutil.rmtree(folder / "params")
    with pytest.raises(ValueError, match=r"params is not a complete orbax checkpoint"):
        ikv.load(folder)


def test_nothing_is_overwritten(written):
    lm, folder = written
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        checkpoint.save(lm, folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["out", "source"]
