"""A named implementation runs on its device or says so; which device, the program decides."""

import jax
import jax.numpy as jnp
import pytest

from inertiakv_jax.pallas_kernels import dispatch
from inertiakv_jax.pallas_kernels.decode_attention.api import decode_attention
from inertiakv_jax.pallas_kernels.evict.api import evict

KNOWN = ("xla", "tpu", "gpu")
ATTENTION = (
    jnp.ones((1, 2, 64)),
    jnp.ones((1, 1, 8, 64)),
    jnp.ones((1, 1, 8, 64)),
    jnp.ones((1, 8), bool),
)
EVICTION = (
    jnp.ones((1, 8)),
    None,
    jnp.arange(8)[None],
    jnp.array([8]),
    jnp.array([7]),
    jnp.ones(1, bool),
)


def attend(*operands, implementation):
    return decode_attention(*operands, implementation=implementation)


def take_step(*operands, implementation):
    return evict(*operands, decay=0.5, implementation=implementation)


CASES = [
    (attend, ATTENTION, "tpu", "a TPU"),
    (attend, ATTENTION, "gpu", "an NVIDIA GPU"),
    (take_step, EVICTION, "tpu", "a TPU"),
]


@pytest.mark.parametrize(("function", "operands", "implementation", "device"), CASES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_other_device_is_told(function, operands, implementation, device, wrap):
    if wrap is jax.vmap:
        operands = jax.tree.map(lambda x: x[None], operands)
    message = (
        f"implementation '{implementation}' needs {device}, "
        "this program is for a device of platform 'cpu'"
    )
    with pytest.raises(ValueError, match=f"^{message}"):
        wrap(lambda *x: function(*x, implementation=implementation))(*operands)


@pytest.mark.parametrize(("function", "operands"), [(attend, ATTENTION), (take_step, EVICTION)])
def test_program_for_another_machine_may_name_its_kernel(function, operands):
    program = jax.jit(lambda *x: function(*x, implementation="tpu")).trace(*operands)
    assert "tpu_custom_call" in program.lower(lowering_platforms=("tpu",)).as_text()
    with pytest.raises(ValueError, match=r"needs a TPU, .* of platform 'cuda'"):
        program.lower(lowering_platforms=("cuda",))


def test_plain_version_and_none_run_everywhere():
    for implementation in ("xla", None):
        assert attend(*ATTENTION, implementation=implementation)[1].sum() == 2.0
        assert take_step(*EVICTION, implementation=implementation)[2].tolist() == [0]


def test_platform_that_is_known_is_checked_at_once():
    def check(implementation, platform):
        return dispatch.check_implementation(implementation, KNOWN, platform=platform)

    for implementation, platform in [
        *((None, "cpu"), ("xla", "cpu"), ("xla", "tpu")),
        *(("tpu", "tpu"), ("gpu", "gpu"), ("gpu", "cuda"), ("tpu", None), ("gpu", None)),
    ]:
        assert check(implementation, platform) == implementation
    for implementation, platform in [
        ("tpu", "cpu"),
        ("gpu", "cpu"),
        ("gpu", "tpu"),
        ("tpu", "gpu"),
    ]:
        with pytest.raises(ValueError, match=f"^implementation '{implementation}' needs a"):
            check(implementation, platform)
    with pytest.raises(ValueError, match="must be None or one of xla, tpu, gpu, got 'cuda'"):
        check("cuda", None)


def test_what_a_kernel_cannot_take_is_refused_while_tracing():
    float16 = [x.astype(jnp.float16) for x in ATTENTION[:3]]
    with pytest.raises(ValueError, match="float32 and bfloat16, not float16"):
        jax.eval_shape(lambda *x: attend(*x, implementation="tpu"), *float16, ATTENTION[3])
    thin = [x[..., :40] for x in ATTENTION[:3]]
    with pytest.raises(ValueError, match="multiple of 16, got 40"):
        jax.eval_shape(lambda *x: attend(*x, implementation="gpu"), *thin, ATTENTION[3])
