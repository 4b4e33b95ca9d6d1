"""Which axis of which parameter is split, and that a model loads straight into its shards."""

import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from weights.tiny_files import LLAMA, hf_tensors, write_folder

from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.partitioning import param_shardings
from inertiakv_jax.weights.hf_config import config_from_hf

MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


UNTIED = LLAMA | {"tie_word_embeddings": False}
ATTENTION = "layers_1/attention/"
MLP = "layers_0/mlp/"


def specs(config, mesh, quantization=None):
    model = DecoderModel(config_from_hf(config), quantization=quantization)
    shardings = param_shardings(model, AbstractMesh(tuple(mesh.values()), tuple(mesh)))
    return {
        "/".join(key.key for key in path): sharding.spec
        for path, sharding in jax.tree.leaves_with_path(shardings)
    }


def test_heads_and_widths_are_split():
    got = specs(UNTIED | {"attention_bias": True}, {"data": 2, "model": 2})
    expected = {
        "embed/embedding": P("model", None),
        "lm_head/kernel": P(None, "model"),
        "final_norm/scale": P(),
        ATTENTION + "q_proj/kernel": P(None, "model"),
        ATTENTION + "k_proj/bias": P("model"),
        ATTENTION + "o_proj/kernel": P("model", None),
        ATTENTION + "o_proj/bias": P(),
        MLP + "gate_proj/kernel": P(None, "model"),
        MLP + "down_proj/kernel": P("model", None),
    }
    assert {name: got[name] for name in expected} == expected


def test_heads_that_the_mesh_does_not_divide_lie_everywhere():
    """4 query heads and 2 kv heads over 4 devices; 300 tokens over 8."""
    got = specs(UNTIED, {"model": 4})
    assert got[ATTENTION + "q_proj/kernel"] == P(None, "model")
    assert got[ATTENTION + "k_proj/kernel"] == got[ATTENTION + "v_proj/kernel"] == P()
    got = specs(UNTIED, {"model": 8})
    assert got[ATTENTION + "q_proj/kernel"] == got[ATTENTION + "o_proj/kernel"] == P()
    assert got["embed/embedding"] == P()
    assert got[MLP + "up_proj/kernel"] == P(None, "model")


def test_scales_of_int8_go_with_their_outputs():
    got = specs(UNTIED, {"model": 2}, quantization="int8")
    assert got[MLP + "up_proj/scale"] == P("model")
    assert got[MLP + "down_proj/kernel"] == P("model", None)
    assert got[MLP + "down_proj/scale"] == P()


def test_experts_have_an_axis_of_their_own_if_the_mesh_has():
    for mesh, axis in (({"model": 2}, "model"), ({"model": 2, "expert": 4}, "expert")):
        got = specs(MOE, mesh, quantization="int8")
        assert got[MLP + "up_proj/kernel"] == got[MLP + "down_proj/scale"] == P(axis)
        assert got[MLP + "router/kernel"] == P()
    assert specs(MOE, {"model": 3})[MLP + "up_proj/kernel"] == P()


SCRIPT = """
import sys
import jax, numpy as np
import inertiakv_jax as ikv
from inertiakv_jax import policies
from inertiakv_jax.models.partitioning import param_shardings
from inertiakv_jax import checkpoint

folder, checkpoint_folder = sys.argv[1:]
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 4), ("data", "model"))
single, split = ikv.load(folder), ikv.load(folder, mesh=mesh)
checkpoint.save(split, checkpoint_folder)
restored = ikv.load(checkpoint_folder, mesh=mesh)
wanted = param_shardings(split.model, mesh)
for lm in (split, restored):
    jax.tree.map(np.testing.assert_array_equal, lm.params, single.params)
    for leaf, sharding in zip(jax.tree.leaves(lm.params), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == sharding, (leaf.sharding, sharding)
kernel = split.params["layers_0"]["mlp"]["up_proj"]["kernel"]
assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 32, 24)}
prompt = np.arange(40)[None] + 5, np.array([40]), policies.inertiakv(0.9)
logits = [ikv.prefill(lm.model, lm.params, *prompt)[1] for lm in (single, split)]
np.testing.assert_allclose(*logits, atol=1e-4)
print("equal")
"""


def test_a_model_loads_straight_into_its_shards(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="needs orbax (extra 'checkpoint')")
    tensors = {name: 0.2 * array for name, array in hf_tensors(MOE).items()}
    folder = write_folder(tmp_path / "m", MOE, tensors)
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout == "equal\n", done.stderr
