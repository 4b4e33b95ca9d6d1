"""The GPU kernels, interpreted on the CPU. That they compile for GPUs: tests/aot."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu
from kernels.decode_attention_contract import DecodeAttentionContract
from kernels.test_decode_attention import MASS_TOLERANCE, random_inputs, random_valid

from inertiakv_jax.pallas_kernels.decode_attention import gpu
from inertiakv_jax.pallas_kernels.decode_attention.gpu import Target
from inertiakv_jax.pallas_kernels.decode_attention.gpu_triton import Tiles

A100 = Target(hopper=False, cores=108)
H100 = Target(hopper=True, cores=132)


class TestTriton(DecodeAttentionContract):
    # Probabilities of 16-bit inputs wait in float16: 2^-11 of each, times the heads of a group.
    mass_tolerance: ClassVar = {"float32": MASS_TOLERANCE, "bfloat16": 2e-3, "float16": 2e-3}
    total_tolerance: ClassVar = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 4e-3}

    def attend(self, *inputs, **options):
        return gpu.decode_attention(
            *inputs, kernel="triton", target=A100, interpret=True, **options
        )

    def tilings(self, shape):
        del shape
        return [Tiles(16, 1), Tiles(64, 2), Tiles(32, 5, num_warps=8, num_stages=2)]

    def test_large_logits_do_not_overflow(self):
        """A split leaves the log of its sum, so the mass is off by 2**-24 of the largest logit."""
        query = jnp.full((1, 1, 64), 50.0)
        keys = jnp.full((1, 1, 3, 64), 50.0).at[0, 0, 1].set(-50.0)
        output, mass = self.jitted(scale=1.0)(query, keys, keys, jnp.ones((1, 3), bool))
        logit = 64 * 50.0 * 50.0
        np.testing.assert_allclose(mass[0, 0], [0.5, 0.0, 0.5], atol=logit * 2**-24)
        np.testing.assert_allclose(output, keys[:, :, 0], rtol=1e-6)


def test_mosaic():
    """A case with the kernel's TMA copies and barriers simulated."""
    if "InterpretGPUParams" not in dir(mosaic_gpu):
        pytest.skip("this version of JAX has no public interpreter for Mosaic GPU")
    shape = (1, 8, 2, 200, 64)
    inputs, valid = random_inputs(shape, "bfloat16"), random_valid(shape, "half")
    got = gpu.decode_attention(
        *inputs,
        jnp.asarray(valid),
        scale=64**-0.5,
        soft_cap=None,
        return_mass=True,
        kernel="mosaic",
        target=H100,
        interpret=True,
    )
    TestTriton().check(got, inputs, valid, "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "slots", "target", "expected"),
    [
        ("bfloat16", 128, 6528, H100, "mosaic"),
        ("bfloat16", 64, 448, H100, "mosaic"),
        ("float32", 128, 6528, H100, "triton"),
        ("bfloat16", 96, 6528, H100, "triton"),
        ("bfloat16", 128, 6402, H100, "triton"),  # no multiple of 8
        ("bfloat16", 128, 6528, A100, "triton"),
    ],
)
def test_default_kernel(dtype, head_dim, slots, target, expected):
    keys = jnp.zeros((1, 1, slots, head_dim), dtype)
    assert gpu.choose_kernel(4, keys, target) == expected
