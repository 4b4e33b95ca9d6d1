"""What every implementation of decode attention must do; each has a test class that inherits this.

The same data builders and float64 loops as the tests of the plain implementation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.test_decode_attention import (
    MASS_TOLERANCE,
    OUTPUT_TOLERANCE,
    random_inputs,
    random_valid,
    reference,
)

VALID_KINDS = ("all", "one", "half", "empty_row", "per_head")

# B, N, K, S, D: one slot, fewer slots than lanes, N = K, K = 1, G of 3, 7, 8 and 16, S around
# multiples of the tiles, each head_dim that kernels know.
SHAPES = [
    (1, 1, 1, 1, 64),
    (2, 4, 2, 5, 128),
    (2, 4, 4, 200, 64),
    (1, 8, 1, 130, 96),
    (1, 9, 3, 257, 64),
    (1, 14, 2, 300, 128),
    (1, 16, 1, 128, 256),
]
# An interpreted kernel is a large program of small steps, run once or twice.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CASES = [(shape, "float32") for shape in SHAPES]
CASES += [(SHAPES[1], "bfloat16"), (SHAPES[4], "bfloat16"), (SHAPES[4], "float16")]


class DecodeAttentionContract:
    """Subclasses say how to call the implementation, and which tiles to vary."""

    output_tolerance = OUTPUT_TOLERANCE
    mass_tolerance = dict.fromkeys(OUTPUT_TOLERANCE, MASS_TOLERANCE)
    total_tolerance = dict.fromkeys(OUTPUT_TOLERANCE, 1e-5)
    """Of the mass summed over all slots."""

    def attend(self, query, keys, values, valid, *, scale, soft_cap, return_mass, tiles):
        """The implementation on the CPU; ``tiles`` None means its own choice."""
        raise NotImplementedError

    def tilings(self, shape) -> list:
        """At least two that differ, for a shape B, N, K, S, D."""
        raise NotImplementedError

    def unsupported(self, shape, dtype) -> str | None:
        """Why the implementation refuses a case; None if it does not."""
        del shape, dtype

    def jitted(self, *, scale=None, soft_cap=None, return_mass=True, tiles=None):
        def attend(query, keys, values, valid):
            return self.attend(
                query,
                keys,
                values,
                valid,
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                soft_cap=soft_cap,
                return_mass=return_mass,
                tiles=tiles,
            )

        return jax.jit(attend, compiler_options=QUICK_TO_COMPILE)

    def check(self, got, inputs, valid, dtype, **options):
        """Output and mass against float64, the sum of the mass, and what is dead."""
        output, mass = got
        batch, num_heads, _ = inputs[0].shape
        num_kv_heads = inputs[1].shape[1]
        assert output.dtype == dtype
        assert output.shape == inputs[0].shape
        assert mass.dtype == jnp.float32
        assert mass.shape == inputs[1].shape[:3]
        expected_output, expected_mass = reference(*inputs, valid, **options)
        np.testing.assert_allclose(
            np.asarray(output, np.float64), expected_output, atol=self.output_tolerance[dtype]
        )
        np.testing.assert_allclose(mass, expected_mass, atol=self.mass_tolerance[dtype])
        valid = valid if valid.ndim == 3 else valid[:, None]
        valid = np.broadcast_to(valid, mass.shape)
        total = np.where(valid.any(axis=-1), num_heads // num_kv_heads, 0)
        np.testing.assert_allclose(mass.sum(-1), total, atol=self.total_tolerance[dtype])
        assert not np.asarray(mass)[~valid].any()
        heads = np.asarray(output, np.float32).reshape(batch, num_kv_heads, -1)
        assert not heads[~valid.any(axis=-1)].any()

    def skip_unsupported(self, shape, dtype):
        reason = self.unsupported(shape, dtype)
        if reason is not None:
            pytest.skip(reason)

    @pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
    def test_against_float64(self, shape, dtype):
        self.skip_unsupported(shape, dtype)
        inputs, attend = random_inputs(shape, dtype), self.jitted()
        for kind in VALID_KINDS:
            valid = random_valid(shape, kind)
            self.check(attend(*inputs, jnp.asarray(valid)), inputs, valid, dtype)

    @pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[5]], ids=str)
    def test_against_jax(self, shape):
        query, keys, values = random_inputs(shape, "float32", seed=1)
        valid = jnp.asarray(random_valid(shape, "half", seed=1)).at[:, 0].set(True)
        expected = jax.jit(jax.nn.dot_product_attention)(
            query[:, None], keys.swapaxes(1, 2), values.swapaxes(1, 2), mask=valid[:, None, None]
        )
        output, _ = self.jitted()(query, keys, values, valid)
        tolerance = 2 * self.output_tolerance["float32"]
        np.testing.assert_allclose(output, expected[:, 0], atol=tolerance)

    @pytest.mark.parametrize("shape", [SHAPES[4], SHAPES[5]], ids=str)
    def test_without_mass_the_output_is_the_same(self, shape):
        inputs, valid = random_inputs(shape, "float32"), jnp.asarray(random_valid(shape, "half"))
        output, mass = self.jitted(return_mass=False)(*inputs, valid)
        assert mass is None
        np.testing.assert_array_equal(output, self.jitted()(*inputs, valid)[0])

    @pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[5]], ids=str)
    def test_tiles_do_not_change_the_numbers(self, shape):
        inputs, valid = random_inputs(shape, "float32"), random_valid(shape, "per_head")
        tilings = self.tilings(shape)
        assert len(set(tilings)) >= 2
        for tiles in tilings:
            got = self.jitted(tiles=tiles)(*inputs, jnp.asarray(valid))
            self.check(got, inputs, valid, "float32")

    def test_soft_cap_and_scale(self):
        shape = (1, 4, 2, 140, 64)
        inputs, valid = random_inputs(shape, "float32"), random_valid(shape, "half")
        options = {"scale": 0.7, "soft_cap": 4.0}
        got = self.jitted(**options)(*inputs, jnp.asarray(valid))
        self.check(got, inputs, valid, "float32", **options)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_dead_slots_may_hold_anything(self, head_dim, dtype):
        shape = (2, 4, 2, 150, head_dim)
        self.skip_unsupported(shape, dtype)
        attend = self.jitted()
        query, keys, values = random_inputs(shape, dtype)
        valid = jnp.asarray(random_valid(shape, "empty_row"))
        expected = attend(query, keys, values, valid)
        dead = ~valid[:, None, :, None]
        for in_keys, in_values in [(np.nan, np.nan), (np.inf, 1.0), (1.0, -np.inf), (0.0, np.nan)]:
            got = attend(
                query,
                jnp.where(dead, jnp.asarray(in_keys, dtype), keys),
                jnp.where(dead, jnp.asarray(in_values, dtype), values),
                valid,
            )
            jax.tree.map(np.testing.assert_array_equal, got, expected)

    def test_what_one_row_holds_does_not_touch_another(self):
        query, keys, values = random_inputs((2, 4, 2, 130, 64), "float32")
        valid = jnp.ones((2, 130), bool)
        attend = self.jitted()
        output, mass = attend(query, keys, values, valid)
        broken_output, broken_mass = attend(query, keys, values.at[1, :, 3].set(jnp.nan), valid)
        assert np.isnan(broken_output[1]).all()
        np.testing.assert_array_equal(broken_output[0], output[0])
        np.testing.assert_array_equal(broken_mass, mass)

    def test_blocks_without_a_valid_slot(self):
        """At the front, where the running maximum has seen nothing; in the middle; at the end."""
        shape = (3, 2, 1, 600, 128)
        inputs, valid = random_inputs(shape, "float32"), np.zeros((3, 600), bool)
        valid[0, 520:530] = valid[1, :7] = valid[1, 590:] = valid[2, 140:150] = True
        for tiles in self.tilings(shape):
            got = self.jitted(tiles=tiles)(*inputs, jnp.asarray(valid))
            self.check(got, inputs, valid, "float32")

    def test_large_logits_do_not_overflow(self):
        query = jnp.zeros((1, 1, 64)).at[..., :2].set(300.0)
        keys = (
            jnp.zeros((1, 1, 3, 64))
            .at[0, 0, :, :2]
            .set(jnp.asarray([[300.0, 300.0], [-300.0, -300.0], [300.0, 300.0]]))
        )
        output, mass = self.jitted(scale=1.0)(query, keys, keys, jnp.ones((1, 3), bool))
        assert mass.tolist() == [[[0.5, 0.0, 0.5]]]
        assert output[0, 0, :3].tolist() == [300.0, 300.0, 0.0]

    def test_ties_share_the_mass(self):
        query, keys = jnp.ones((1, 4, 64)), jnp.ones((1, 2, 5, 64))
        valid = jnp.asarray([[True, True, False, True, True]])
        _, mass = self.jitted()(query, keys, keys, valid)
        assert mass.tolist() == [[[0.5, 0.5, 0.0, 0.5, 0.5]] * 2]

    def test_drawn_shapes(self):
        # Within, because hypothesis wants no `self` that pytest's inheritance shares.
        draw_and_check = functools.partial(_check_drawn_shape, self)
        settings(max_examples=6, deadline=None, derandomize=True)(
            given(data=st.data())(lambda data: draw_and_check(data))
        )()


def _check_drawn_shape(contract, data):
    num_kv_heads = data.draw(st.integers(1, 3))
    shape = (
        data.draw(st.integers(1, 2)),
        num_kv_heads * data.draw(st.integers(1, 9)),
        num_kv_heads,
        data.draw(st.integers(1, 400)),
        data.draw(st.sampled_from([64, 96, 128])),
    )
    kind = data.draw(st.sampled_from(VALID_KINDS))
    tiles = data.draw(st.sampled_from([None, *contract.tilings(shape)]))
    if contract.unsupported(shape, "float32") is None:
        inputs, valid = random_inputs(shape, "float32"), random_valid(shape, kind)
        got = contract.jitted(tiles=tiles)(*inputs, jnp.asarray(valid))
        contract.check(got, inputs, valid, "float32")
