"""The TPU kernel, interpreted on the CPU. That it compiles for TPUs: tests/aot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernels.decode_attention_contract import DecodeAttentionContract
from kernels.test_decode_attention import random_inputs, random_valid

from inertiakv_jax.pallas_kernels.decode_attention import shapes, tpu
from inertiakv_jax.pallas_kernels.decode_attention.tpu_tiles import Tiles, choose_tiles


class TestTpu(DecodeAttentionContract):
    # Observed: output 6.1e-7 in float32, 7.2e-3 in bfloat16; mass 4.5e-7. The suite's tolerances.
    def attend(self, *inputs, **options):
        return tpu.decode_attention(*inputs, interpret=True, **options)

    def tilings(self, shape):
        num_kv_heads = shape[2]
        return [
            Tiles(1, 128),
            Tiles(num_kv_heads, 256),
            Tiles(num_kv_heads, 128, logits_in_vmem=False),
        ]

    def unsupported(self, shape, dtype):
        del shape
        return tpu.refusal(dtype)


def test_float16_is_refused():
    query, keys = jnp.ones((1, 2, 64), jnp.float16), jnp.ones((1, 2, 5, 64), jnp.float16)
    options = {"scale": 1.0, "soft_cap": None, "return_mass": True}
    with pytest.raises(ValueError, match="takes float32 or bfloat16, got float16"):
        tpu.decode_attention(query, keys, keys, jnp.ones((1, 5), bool), **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_simulated_memory(head_dim):
    """Copies between HBM and VMEM simulated, what was never written filled with NaN."""
    shape = (2, 6, 2, 300, head_dim)
    inputs = random_inputs(shape, "float32")
    valid = jnp.asarray(random_valid(shape, "half"))
    options = {"scale": 0.1, "soft_cap": None, "return_mass": True, "tiles": Tiles(2, 128)}
    simulated = pltpu.InterpretParams(
        uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
    )
    got = tpu.decode_attention(*inputs, valid, interpret=simulated, **options)
    expected = tpu.decode_attention(*inputs, valid, interpret=True, **options)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_tiles_check_themselves():
    with pytest.raises(ValueError, match="slots must be a multiple of 128, got 100"):
        Tiles(1, 100)
    with pytest.raises(ValueError, match="slots must be a multiple of 128, got 0"):
        Tiles(1, 0)
    with pytest.raises(ValueError, match="kv_heads must be at least 1, got 0"):
        Tiles(0, 128)
    query, keys = jnp.ones((1, 3, 64)), jnp.ones((1, 3, 5, 64))
    with pytest.raises(ValueError, match=r"tiles\.kv_heads=2 must divide num_kv_heads=3"):
        tpu.decode_attention(
            query,
            keys,
            keys,
            jnp.ones((1, 5), bool),
            scale=1.0,
            soft_cap=None,
            return_mass=True,
            tiles=Tiles(2, 128),
        )


@pytest.mark.parametrize("heads", shapes.MODELS, ids=lambda heads: heads.name)
@pytest.mark.parametrize("slots", shapes.SLOTS)
def test_chosen_tiles(heads, slots):
    for batch in shapes.BATCHES:
        tiles = choose_tiles(batch, heads.num_kv_heads, heads.group, slots, heads.head_dim, 2)
        assert heads.num_kv_heads % tiles.kv_heads == 0
        assert tiles.logits_in_vmem
        block = 2 * tiles.kv_heads * tiles.slots * heads.head_dim * 2
        assert block <= 2 << 20  # bytes of keys and values
        assert tiles.slots < slots + 128
        if batch == 1 and heads.num_kv_heads % 2 == 0:
            assert heads.num_kv_heads // tiles.kv_heads == 2  # work for two cores


def test_logits_leave_vmem_only_where_rows_are_very_long():
    million = choose_tiles(1, 8, 8, 1 << 20, 128, 2)
    assert million == Tiles(kv_heads=1, slots=4096, logits_in_vmem=True)  # 45 MiB
    assert not choose_tiles(1, 8, 16, 1 << 20, 128, 2).logits_in_vmem


@pytest.mark.parametrize("tiles", [None, Tiles(2, 128, logits_in_vmem=False)])
def test_bytes_that_the_mass_adds(tiles):
    """Of the arrays that enter and leave the kernel; each is read or written once."""
    batch, heads, slots = 8, shapes.LLAMA_3_1_8B, 16384
    if tiles is None:
        tiles = choose_tiles(batch, 8, 4, slots, 128, 2)
    traffic = {
        return_mass: _kernel_bytes(batch, heads, slots, tiles, return_mass)
        for return_mass in (False, True)
    }
    kv_bytes = heads.kv_bytes(batch, slots, 2)
    assert kv_bytes == 536_870_912
    assert kv_bytes < traffic[False] < 1.002 * kv_bytes
    share = (traffic[True] - traffic[False]) / kv_bytes
    # 4 of 512 bytes a slot and head; with logits in HBM 16 more, which are also read again.
    assert share == pytest.approx(4 / 512 if tiles.logits_in_vmem else 16 / 512, rel=0.05)


def _kernel_bytes(batch, heads, slots, tiles, return_mass):
    def attend(query, keys, values, valid):
        options = {"scale": 1.0, "soft_cap": None, "return_mass": return_mass, "tiles": tiles}
        return tpu.decode_attention(query, keys, values, valid, **options)

    kv = jax.ShapeDtypeStruct((batch, heads.num_kv_heads, slots, heads.head_dim), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((batch, heads.num_heads, heads.head_dim), jnp.bfloat16)
    valid = jax.ShapeDtypeStruct((batch, slots), jnp.bool_)
    program = jax.make_jaxpr(attend)(query, kv, kv, valid)
    (call,) = [e for e in program.eqns if e.primitive.name == "pallas_call"]
    return sum(v.aval.size * v.aval.dtype.itemsize for v in (*call.invars, *call.outvars))
