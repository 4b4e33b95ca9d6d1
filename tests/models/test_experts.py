"""The router by hand, and groups of rows with their own weights against one product per row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inertiakv_jax.config import ExpertsConfig, ModelConfig
from inertiakv_jax.models import experts
from inertiakv_jax.models.experts import ExpertsMLP, Kernels, route

EXPERTS = ExpertsConfig(num_experts=4, num_per_token=2, intermediate_size=24)
CONFIG = ModelConfig("qwen3_moe", 97, 32, 48, 1, 4, 2, 8, experts=EXPERTS)
WAYS = {
    "tiles": experts._grouped_mlp_by_tiles,
    "ragged_dot": experts._grouped_mlp_by_ragged_dot,
}


def test_router_by_hand():
    """Softmax of (0, ln 2, ln 4, ln 1) is (1, 2, 4, 1) / 8."""
    logits = jnp.log(jnp.asarray([[1.0, 2.0, 4.0, 1.0]]))
    weights, chosen = route(logits, EXPERTS)
    assert chosen.tolist() == [[2, 1]]
    np.testing.assert_allclose(weights, [[2 / 3, 1 / 3]], rtol=1e-6)
    weights, _ = route(logits, dataclasses.replace(EXPERTS, normalize_weights=False))
    np.testing.assert_allclose(weights, [[0.5, 0.25]], rtol=1e-6)


def random_kernels(rng, groups):
    shapes = {"gate": (groups, 32, 24), "up": (groups, 32, 24), "down": (groups, 24, 32)}
    return {name: rng.normal(size=shape) * shape[1] ** -0.5 for name, shape in shapes.items()}


def mlp(x, gate, up, down):
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "sizes",
    [
        [1, 3, 0, 1, 1, 0, 0],  # fewer rows than groups: one at a time
        [0, 17, 1, 31, 0, 40, 3],  # tiles that reach into one or several groups
        [16, 16, 0, 32, 16, 16, 16],  # whole tiles
        [0, 0, 0, 33, 0, 0, 0],
    ],
    ids=str,
)
def test_each_group_of_rows_has_its_weights(way, sizes):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(sum(sizes), 32))
    kernels = random_kernels(rng, len(sizes))
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.stack(
        [mlp(row, *(k[g] for k in kernels.values())) for row, g in zip(rows, group, strict=True)]
    )
    stacked = [Kernels(jnp.asarray(kernel, jnp.float32), None) for kernel in kernels.values()]
    run = jax.jit(WAYS[way], static_argnames="activation")
    arrays = jnp.asarray(rows, jnp.float32), jnp.asarray(sizes, jnp.int32)
    got = run(*arrays, *stacked, activation="silu")
    np.testing.assert_allclose(got, expected, atol=1e-5)  # observed 1e-6


@pytest.mark.parametrize("way", ["tiles", "ragged_dot"])
def test_int8_kernels_are_scaled_by_output(way):
    sizes = [0, 17, 1, 31, 0, 40, 3]
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(sum(sizes), 32))
    numbers = {
        name: (
            rng.integers(-127, 128, size=kernel.shape),
            rng.uniform(1, 2, size=(len(sizes), kernel.shape[2])) / 127 / kernel.shape[1] ** 0.5,
        )
        for name, kernel in random_kernels(rng, len(sizes)).items()
    }
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.stack(
        [
            mlp(row, *(values[g] * scale[g] for values, scale in numbers.values()))
            for row, g in zip(rows, group, strict=True)
        ]
    )
    stacked = [
        Kernels(jnp.asarray(values, jnp.int8), jnp.asarray(scale, jnp.float32))
        for values, scale in numbers.values()
    ]
    run = jax.jit(WAYS[way], static_argnames="activation")
    arrays = jnp.asarray(rows, jnp.float32), jnp.asarray(sizes, jnp.int32)
    got = run(*arrays, *stacked, activation="silu")
    np.testing.assert_allclose(got, expected, atol=1e-5)  # observed 1e-6


def test_tokens_go_to_their_experts_alone():
    """Against the plain sum over a token's experts, in float64."""
    rng = np.random.default_rng(0)
    hidden, router = rng.normal(size=(2, 50, 32)), rng.normal(size=(32, 4))
    kernels = random_kernels(rng, 4)
    expected = np.zeros_like(hidden)
    for place in np.ndindex(2, 50):
        logits = hidden[place] @ router
        chosen = np.argsort(-logits)[:2]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            output = mlp(hidden[place], *(kernel[expert] for kernel in kernels.values()))
            expected[place] += weight * output
    tree = {"router": {"kernel": router}} | {
        f"{name}_proj": {"kernel": kernel} for name, kernel in kernels.items()
    }
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)
    module = ExpertsMLP(CONFIG, EXPERTS, jnp.dtype("float32"))
    got = jax.jit(module.apply)({"params": params}, jnp.asarray(hidden, jnp.float32))
    np.testing.assert_allclose(got, expected, atol=1e-5)  # observed 1e-6


@pytest.mark.parametrize("int8", [False, True])
def test_devices_with_half_of_the_experts_add_up_to_all(int8):
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2, 30, 32)), jnp.float32)
    logits = rng.normal(size=(2, 30, 4))
    logits[0, :5] = [9.0, 8.0, 0.0, 0.0]  # both of a token's experts on one device
    weights, chosen = route(jnp.asarray(logits, jnp.float32), EXPERTS)
    kernels = {
        f"{name}_proj": Kernels(
            jnp.asarray(40 * kernel, jnp.int8) if int8 else jnp.asarray(kernel, jnp.float32),
            jnp.full((4, kernel.shape[2]), 1 / 40, jnp.float32) if int8 else None,
        )
        for name, kernel in random_kernels(rng, 4).items()
    }
    expected = experts._mix(hidden, weights, chosen, kernels, activation="silu")
    halves = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), kernels)
    part = functools.partial(
        experts._mix, activation="silu", experts_axis="expert", sum_axes=("expert",)
    )
    got = jax.vmap(part, in_axes=(None, None, None, 0), axis_name="expert")(
        hidden, weights, chosen, halves
    )
    np.testing.assert_allclose(got, jnp.stack([expected] * 2), atol=1e-5)  # observed 1e-6
