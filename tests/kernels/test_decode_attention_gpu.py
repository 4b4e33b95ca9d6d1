"""The GPU kernels, interpreted on the CPU. That they compile for GPUs: tests/aot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.decode_attention_contract import DecodeAttentionContract
from kernels.test_decode_attention import random_inputs, random_valid, reference

from inertiakv_jax.pallas_kernels.decode_attention import (
    gpu,
    gpu_merge,
    gpu_mosaic,
    gpu_triton,
    shapes,
)

# Absolute. 16-bit inputs: codes of weights are rounded by at most 3.4e-4 of each; masses here are
# at most 3. Observed: 1.2e-7, 3.3e-4, 3.3e-4. Sums of masses: 7.2e-7, 8.2e-5, 8.2e-5.
MASS_TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-3}
TOTAL_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
A100, H100 = gpu.Target(hopper=False, cores=108), gpu.Target(hopper=True, cores=132)
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="Mosaic GPU's interpreter knows wgmma from jax 0.12 on",
)


class TestTriton(DecodeAttentionContract):
    mass_tolerance = MASS_TOLERANCE
    total_tolerance = TOTAL_TOLERANCE

    def attend(self, *inputs, **options):
        return gpu.decode_attention(
            *inputs, kernel="triton", target=A100, interpret=True, **options
        )

    def tilings(self, shape):
        del shape
        tiles = gpu_triton.Tiles
        return [tiles(16, 1), tiles(32, 3, num_warps=8), tiles(64, 100, num_stages=2)]

    @pytest.mark.parametrize("soft_cap", [None, 5.0])
    def test_negative_scale(self, soft_cap):
        """The largest product is then the smallest logit."""
        shape = (1, 4, 2, 140, 64)
        inputs, valid = random_inputs(shape, "float32"), random_valid(shape, "half")
        options = {"scale": -0.3, "soft_cap": soft_cap}
        got = self.jitted(**options)(*inputs, jnp.asarray(valid))
        self.check(got, inputs, valid, "float32", **options)


class Mosaic(DecodeAttentionContract):
    """Not the whole contract, mostly float32; the interpreter takes a second a call."""

    mass_tolerance = MASS_TOLERANCE
    total_tolerance = TOTAL_TOLERANCE

    def attend(self, *inputs, **options):
        return gpu.decode_attention(
            *inputs, kernel="mosaic", target=H100, interpret=True, **options
        )

    def tilings(self, shape):
        del shape
        return [gpu_mosaic.Tiles(64, 2, 2), gpu_mosaic.Tiles(128, 3, 1)]


MOSAIC = Mosaic()


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((1, 1, 1, 8, 64), "bfloat16", "one"),
        ((2, 8, 2, 136, 64), "bfloat16", "half"),
        ((2, 8, 2, 136, 64), "float16", "per_head"),
        ((2, 6, 2, 200, 128), "float16", "empty_row"),
        ((1, 7, 1, 72, 128), "bfloat16", "all"),
        ((1, 16, 1, 64, 256), "bfloat16", "half"),
    ],
    ids=str,
)
def test_mosaic_against_float64(shape, dtype, kind):
    inputs, valid = random_inputs(shape, dtype), random_valid(shape, kind)
    MOSAIC.check(MOSAIC.jitted()(*inputs, jnp.asarray(valid)), inputs, valid, dtype)


@needs_interpreter
@pytest.mark.parametrize("tiles", MOSAIC.tilings(None), ids=str)
def test_mosaic_tiles_do_not_change_the_numbers(tiles):
    shape = (1, 8, 2, 264, 64)
    inputs, valid = random_inputs(shape, "bfloat16"), random_valid(shape, "per_head")
    valid[:, :, 64:200] = False  # whole blocks
    got = MOSAIC.jitted(tiles=tiles)(*inputs, jnp.asarray(valid))
    MOSAIC.check(got, inputs, valid, "bfloat16")


@needs_interpreter
# The interpreter multiplies in NumPy, which says so when a dead key is NaN; its logit is masked.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_mosaic_dead_slots_may_hold_anything():
    query, keys, values = random_inputs((2, 4, 2, 152, 64), "bfloat16")
    valid = jnp.asarray(random_valid((2, 4, 2, 152, 64), "empty_row"))
    attend = MOSAIC.jitted()
    expected = attend(query, keys, values, valid)
    dead = ~valid[:, None, :, None]
    for in_keys, in_values in [(np.nan, np.nan), (np.inf, -np.inf)]:
        got = attend(
            query,
            jnp.where(dead, jnp.bfloat16(in_keys), keys),
            jnp.where(dead, jnp.bfloat16(in_values), values),
            valid,
        )
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@needs_interpreter
def test_mosaic_without_mass_and_with_soft_cap():
    shape = (1, 4, 2, 136, 64)
    inputs, valid = random_inputs(shape, "bfloat16"), random_valid(shape, "half")
    options = {"scale": 0.7, "soft_cap": 4.0}
    output, mass = MOSAIC.jitted(**options)(*inputs, jnp.asarray(valid))
    MOSAIC.check((output, mass), inputs, valid, "bfloat16", **options)
    plain, nothing = MOSAIC.jitted(return_mass=False, **options)(*inputs, jnp.asarray(valid))
    assert nothing is None
    np.testing.assert_array_equal(plain, output)


@needs_interpreter
def test_mosaic_copies_and_barriers_are_in_order():
    """Each stage refilled, codes copied out of reused memory; any race raises."""
    from jax.experimental.pallas import mosaic_gpu as mgpu

    inputs = random_inputs((1, 8, 1, 264, 64), "bfloat16")
    valid = random_valid((1, 8, 1, 264, 64), "per_head")
    output, _ = gpu_mosaic.decode_attention(
        *inputs,
        jnp.asarray(valid),
        scale=0.125,
        soft_cap=None,
        return_mass=True,
        tiles=gpu_mosaic.Tiles(64, 2, 2),
        interpret=mgpu.InterpretGPUParams(detect_races=True),
    )
    expected, _ = reference(*inputs, valid)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, atol=1.5e-2)


def test_small_masses_keep_their_order():
    """Behind an attention sink, where float16 weights would be a few values, most of them 0."""
    slots = 512
    logits = np.full(slots, 0.0)
    logits[0] = 20.0  # the sink
    logits[1:] = np.linspace(0.0, -1.0, slots - 1)  # weights from 2e-9 down, all different
    keys = jnp.asarray(np.stack([logits, *np.zeros((15, slots))], axis=-1), jnp.bfloat16)
    keys = keys[None, None]
    query = jnp.zeros((1, 1, 16), jnp.bfloat16).at[0, 0, 0].set(1.0)
    _, mass = TestTriton().jitted(scale=1.0)(query, keys, keys, jnp.ones((1, slots), bool))
    exact = np.exp(np.asarray(keys[0, 0, :, 0], np.float64))
    exact /= exact.sum()
    np.testing.assert_allclose(mass[0, 0], exact, rtol=3.5e-4)


def test_codes_are_as_exact_as_they_say():
    exponents = -jnp.linspace(0.0, 63.9, 100_000)
    held = jnp.ones(exponents.shape, bool)
    weights = gpu_merge.decode(gpu_merge.encode(exponents, held, jnp.int16))
    np.testing.assert_allclose(weights, np.exp2(np.asarray(exponents, np.float64)), rtol=3.45e-4)
    low = gpu_merge.encode(
        jnp.asarray([-64.5, -1e30, 0.0]), jnp.asarray([True, True, False]), jnp.int16
    )
    assert gpu_merge.decode(low).tolist() == [0.0, 0.0, 0.0]
    assert gpu_merge.decode(gpu_merge.encode(jnp.zeros(1), held[:1], jnp.int16)).tolist() == [1.0]


def traffic(heads, batch, slots, dtype, kernel, target):
    """Bytes of all arrays that enter or leave the kernel, without and with mass."""

    def bytes_of(return_mass):
        def attend(*inputs):
            return gpu.decode_attention(
                *inputs,
                scale=1.0,
                soft_cap=None,
                return_mass=return_mass,
                kernel=kernel,
                target=target,
            )

        kv = jax.ShapeDtypeStruct((batch, heads.num_kv_heads, slots, heads.head_dim), dtype)
        query = jax.ShapeDtypeStruct((batch, heads.num_heads, heads.head_dim), dtype)
        valid = jax.ShapeDtypeStruct((batch, slots), jnp.bool_)
        program = jax.make_jaxpr(attend)(query, kv, kv, valid)
        names = ("pallas_call", "custom_vmap_call")
        (call,) = [e for e in program.eqns if e.primitive.name in names]
        inputs, outputs = ([v.aval for v in part] for part in (call.invars, call.outvars))
        assert [x.shape for x in inputs].count(kv.shape) == 2
        return tuple(sum(x.size * x.dtype.itemsize for x in part) for part in (inputs, outputs))

    return bytes_of(False), bytes_of(True)


@pytest.mark.parametrize(("kernel", "target"), [("triton", A100), ("mosaic", H100)])
@pytest.mark.parametrize(("batch", "slots"), [(1, 6656), (8, 16384), (1, 65536), (32, 1024)])
def test_bytes_that_the_mass_adds(kernel, target, batch, slots):
    """Codes and maxima are written and read again, the mass is written: under 5% of K and V."""
    heads = shapes.LLAMA_3_1_8B
    plain, scored = traffic(heads, batch, slots, "bfloat16", kernel, target)
    kv_bytes = heads.kv_bytes(batch, slots, 2)
    assert kv_bytes < plain[0] == scored[0] < 1.01 * kv_bytes
    extra = 2 * (scored[1] - plain[1]) + heads.mass_bytes(batch, slots)
    assert 20 / 512 < extra / kv_bytes < 0.05
    # Partial outputs, too, are written and read again.
    assert 2 * plain[1] < 0.06 * kv_bytes


def test_bytes_of_a_slot():
    """To the byte, where splits come out even: G * (2 + 2) + 4 of codes and mass, and maxima."""
    plain, scored = traffic(shapes.LLAMA_3_1_8B, 8, 16384, "bfloat16", "triton", H100)
    rows, group = 8 * 8 * 16384, 4
    assert scored[1] - plain[1] == rows * group * 2 + rows // 64 * group * 4
    plain, scored = traffic(shapes.LLAMA_3_1_8B, 8, 16384, "float32", "triton", H100)
    assert scored[1] - plain[1] == rows * group * 4 + rows // 32 * group * 4


@pytest.mark.parametrize("heads", shapes.MODELS, ids=lambda heads: heads.name)
@pytest.mark.parametrize("slots", shapes.SLOTS)
def test_splits_fill_the_gpu(heads, slots):
    for module, target in [(gpu_triton, A100), (gpu_triton, H100), (gpu_mosaic, H100)]:
        for batch in shapes.BATCHES:
            tiles = module.choose_tiles(
                batch,
                heads.num_kv_heads,
                heads.group,
                slots,
                heads.head_dim,
                2,
                cores=target.cores,
            )
            partition = gpu_merge.cut(slots, tiles.slots, tiles.splits)
            assert partition.blocks_per_split * (partition.splits - 1) < partition.blocks
            assert partition.padded_blocks >= partition.blocks
            thread_blocks = batch * heads.num_kv_heads * partition.splits
            # Where there are enough blocks, each SM has work; short rows are cut to the last block.
            assert thread_blocks >= 0.85 * target.cores or partition.blocks_per_split == 1


def test_default_kernel():
    def choose(target, dtype="bfloat16", slots=6656, head_dim=128, group=4):
        return gpu.choose_kernel(
            group, jax.ShapeDtypeStruct((1, 8, slots, head_dim), dtype), target
        )

    assert choose(A100) == "triton"
    assert choose(H100) == "mosaic"
    assert choose(H100, dtype="float32") == "triton"
    assert choose(H100, slots=6402) == "triton"
    assert choose(H100, head_dim=96) == "triton"
    assert choose(H100, group=12) == "triton"
    assert choose(H100, group=16) == "mosaic"


def test_target_is_that_of_the_mesh():
    keys = jnp.ones((1, 1, 8, 64))
    assert gpu.find_target(keys) == gpu.Target(hopper=False, cores=108)  # none: what runs anywhere
    for kind, cores, expected in [
        ("NVIDIA H100 80GB HBM3", 132, gpu.Target(True, 132)),
        ("NVIDIA H200", 132, gpu.Target(True, 132)),
        ("NVIDIA GH200 480GB", 132, gpu.Target(True, 132)),
        ("NVIDIA A100-SXM4-80GB", 108, gpu.Target(False, 108)),
        ("NVIDIA L4", None, gpu.Target(False, 108)),
        ("NVIDIA B200", 148, gpu.Target(False, 148)),
    ]:
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
        mesh = jax.sharding.AbstractMesh(
            (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
        )
        with jax.sharding.use_abstract_mesh(mesh):
            assert gpu.find_target(keys) == expected


def test_refusals_name_what_was_given():
    def attend(shape=(1, 4, 2, 64, 64), dtype="bfloat16", **options):
        inputs = random_inputs(shape, dtype)
        valid = jnp.ones((shape[0], shape[3]), bool)
        options = {"scale": 1.0, "soft_cap": None, "return_mass": True, **options}
        return gpu.decode_attention(*inputs, valid, **options)

    with pytest.raises(
        ValueError, match="kernel must be None or one of mosaic, triton, got 'cuda'"
    ):
        attend(kernel="cuda")
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16, got 72"):
        attend((1, 4, 2, 64, 72), kernel="triton")
    with pytest.raises(ValueError, match="multiplies bfloat16 and float16, not float32"):
        attend(dtype="float32", kernel="mosaic")
    with pytest.raises(ValueError, match="head_dim must be 64, 128 or 256, got 96"):
        attend((1, 4, 2, 64, 96), kernel="mosaic")
    with pytest.raises(ValueError, match="S must be a multiple of 8, as TMA's tiles are, got 65"):
        attend((1, 4, 2, 65, 64), kernel="mosaic")
    with pytest.raises(ValueError, match=r"G must be below 8 or a multiple of 8.*got 12"):
        attend((1, 12, 1, 64, 64), kernel="mosaic")


def test_tiles_check_themselves():
    with pytest.raises(ValueError, match="slots must be a power of two, at least 16, got 48"):
        gpu_triton.Tiles(48, 1)
    with pytest.raises(ValueError, match="num_warps must be a power of two, got 3"):
        gpu_triton.Tiles(64, 1, num_warps=3)
    with pytest.raises(ValueError, match="splits and num_stages must be at least 1, got 0, 3"):
        gpu_triton.Tiles(64, 0)
    with pytest.raises(ValueError, match="slots must be a multiple of 64, got 32"):
        gpu_mosaic.Tiles(32, 1)
    with pytest.raises(ValueError, match="splits and stages must be at least 1, got 2, 0"):
        gpu_mosaic.Tiles(64, 2, 0)
