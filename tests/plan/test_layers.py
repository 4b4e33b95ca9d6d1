"""Models cut down to a few layers, and straight lines through them."""

import pytest

from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.plan.layers import extrapolate, samples
from inertiakv_jax.plan.sizes import weight_bytes
from inertiakv_jax.plan.topology import MeshShape
from inertiakv_jax.weights.catalogue import CATALOGUE


def test_equal_layers():
    config = CATALOGUE["llama-3.3-70b"].config
    assert [sample.num_layers for sample in samples(config)] == [1, 2]
    # 10 beside the layers, 3 each: 13 and 16, and with all 80 layers 250.
    assert extrapolate(config, [13, 16]) == 250


def test_two_kinds_of_layers():
    # Gemma-3-270m: 18 layers, every sixth without a window.
    config = CATALOGUE["gemma-3-270m"].config
    first, *more = samples(config)
    assert first.sliding_windows == (512, None)
    assert [sample.sliding_windows for sample in more] == [(512, 512, None), (512, None, None)]
    # 15 windows of 2, 3 other layers of 5, and 1.
    assert extrapolate(config, [8, 10, 13]) == 1 + 15 * 2 + 3 * 5


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As their makers count, and the catalogue: test_catalogue.py counts the real shapes.
        *(("gemma-3-270m", 268_098_176), ("qwen2.5-0.5b", 494_032_768)),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_weights_lie_on_the_line(name, parameters):
    model = DecoderModel(CATALOGUE[name].config, "bfloat16")
    assert weight_bytes(model, MeshShape(1, 1)) == 2 * parameters
