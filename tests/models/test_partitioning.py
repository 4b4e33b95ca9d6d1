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
from inertiakv_jax.sharding import HEAD_PARTS, SHARING, expert_layout, layout
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
        "embed/embedding": P(SHARING, None),
        "lm_head/kernel": P(None, SHARING),
        "final_norm/scale": P(None),
        ATTENTION + "q_proj/kernel": P(None, HEAD_PARTS),
        ATTENTION + "k_proj/bias": P(("heads",)),
        ATTENTION + "o_proj/kernel": P(HEAD_PARTS, None),
        ATTENTION + "o_proj/bias": P(None),
        MLP + "gate_proj/kernel": P(None, SHARING),
        MLP + "down_proj/kernel": P(SHARING, None),
    }
    assert {name: got[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("heads", "sizes", "expected"),
    [
        ((32, 8), {"data": 2, "model": 8}, (2, 1, 8, 1, 1)),
        ((16, 2), {"data": 1, "model": 8}, (1, 1, 2, 4, 1)),
        ((9, 3), {"data": 1, "model": 8}, (1, 1, 1, 1, 8)),  # SmolLM2
        ((9, 3), {"model": 6}, (1, 1, 3, 1, 2)),
        ((14, 2), {"model": 7}, (1, 1, 1, 7, 1)),  # Qwen2.5-0.5B
        ((24, 12), {"model": 8}, (1, 1, 4, 2, 1)),
        ((32, 8), {"data": 2, "context": 2, "expert": 4, "model": 2}, (2, 2, 8, 1, 1)),
    ],
)
def test_the_devices_of_a_row_are_cut_as_the_heads_allow(heads, sizes, expected):
    config = LLAMA | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    cut = layout(mesh, DecoderModel(config_from_hf(config)))
    assert cut.axis_names == ("data", "context", "heads", "group", "spare")
    assert cut.axis_sizes == expected


def test_a_width_that_the_mesh_does_not_divide_lies_everywhere():
    """300 tokens over 8 devices; 64 columns of the MLP."""
    got = specs(UNTIED, {"model": 8})
    assert got["embed/embedding"] == P(None, None)
    assert got[MLP + "up_proj/kernel"] == P(None, SHARING)


def test_scales_of_int8_go_with_their_outputs():
    got = specs(UNTIED, {"model": 2}, quantization="int8")
    assert got[MLP + "up_proj/scale"] == P(SHARING)
    assert got[MLP + "down_proj/kernel"] == P(SHARING, None)
    assert got[MLP + "down_proj/scale"] == P(None)


def test_experts_are_split_over_their_own_axis_or_else_over_model():
    """8 experts of width 24."""
    got = specs(MOE, {"model": 2}, quantization="int8")
    assert got[MLP + "up_proj/kernel"] == P("expert", None, "model")  # of 1 device
    assert got[MLP + "down_proj/scale"] == P("expert", None)
    assert got[MLP + "router/kernel"] == P(None, None)
    got = specs(MOE, {"model": 2, "expert": 4})
    assert got[MLP + "down_proj/kernel"] == P("expert", "model", None)
    assert specs(MOE, {"model": 3})[MLP + "up_proj/kernel"] == P(None, None, "model")


def test_the_devices_keep_their_order_whatever_the_order_of_the_axes():
    mesh = AbstractMesh((4, 2), ("model", "data"))
    assert expert_layout(mesh, 8, 24)[0].axis_sizes == (2, 1, 4, 1)


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
logits = [
    ikv.prefill(lm.model, lm.params, *prompt, mesh=mesh if lm is split else None)[1]
    for lm in (single, split)
]
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
