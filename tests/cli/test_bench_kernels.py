"""``inertiakv bench kernels``: what is counted, what is timed, the table and the JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inertiakv_jax import cli
from inertiakv_jax.commands import bench_kernels
from inertiakv_jax.commands import bench_kernels_report as reports
from inertiakv_jax.pallas_kernels import bench
from inertiakv_jax.pallas_kernels.bench import Measured
from inertiakv_jax.pallas_kernels.compact import bench as compact
from inertiakv_jax.pallas_kernels.decode_attention import bench as decode_attention
from inertiakv_jax.pallas_kernels.decode_attention.shapes import LLAMA_3_1_8B, SMOLLM2_135M
from inertiakv_jax.pallas_kernels.evict import bench as evict

LLAMA = decode_attention.Case(LLAMA_3_1_8B, batch=8, slots=16384, dtype="bfloat16")
SMALL = {
    "decode_attention": decode_attention.Case(SMOLLM2_135M, 2, 24, "float32"),
    "evict": evict.Case(evict.SHARED, None, 2, 24),
    "evict_heads": evict.Case("smollm2-135m", 3, 2, 24),
    "compact": compact.Case(SMOLLM2_135M, 2, 200, "float32"),
}
TINY = ["--shapes", "smollm2-135m", "--slots", "24", "--batch", "2", "--repeats", "2"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A copy and calls that take no time to speak of."""
    monkeypatch.setattr(bench, "_COPIED_BYTES", 2**20)
    monkeypatch.setattr(bench, "_MOST_SETS", 2)
    monkeypatch.setattr(bench, "_MOST_CALLS", 6)


def test_bytes_moved_are_each_operand_and_result_once():
    keys_and_values = 536_870_912  # 2 x 8 x 8 x 16,384 x 128 x 2 bytes
    query_and_output = 131_072  # 2 x 8 x 32 x 128 x 2 bytes
    mask = 131_072  # 8 x 16,384
    mass = 4_194_304  # 8 x 8 x 16,384 x 4 bytes
    assert LLAMA.read_bytes == keys_and_values
    assert LLAMA.bytes_moved(False) == keys_and_values + query_and_output + mask
    assert LLAMA.bytes_moved(True) == keys_and_values + query_and_output + mask + mass

    shared = evict.Case(evict.SHARED, None, 8, 6402)
    # 8 x 6,402 slots; 8 rows of two numbers and a flag in, one number out
    assert shared.bytes_moved(True) == 51_216 * 20 + 8 * 13
    assert shared.bytes_moved(False) == 51_216 * 16 + 8 * 13
    assert evict.Case("llama-3.1-8b", 8, 8, 6402).bytes_moved(True) == 8 * shared.bytes_moved(True)

    shrunk = compact.Case(LLAMA_3_1_8B, 8, 65536, "bfloat16")
    assert shrunk.kept == 6592  # 6,554 in buckets of 64
    # 2 x 8 x 8 x 6,592 x 128 x 2 bytes, read and written; 8 x 6,592 x 4 of index
    assert shrunk.bytes_moved(True) == 2 * 216_006_656 + 210_944


@pytest.mark.parametrize(
    ("slots", "sets", "cold"),
    [
        (65536, 1, True),  # 256 MiB
        (16384, 3, True),  # 64 MiB: two are 128 MiB, and no more than that
        (6402, 6, True),
        (1024, 16, False),  # 4 MiB: sixteen are 64 MiB
    ],
)
def test_sets_are_more_than_the_device_keeps(slots, sets, cold, monkeypatch):
    monkeypatch.setattr(bench, "_MOST_SETS", 16)
    case = decode_attention.Case(LLAMA_3_1_8B, 1, slots, "bfloat16")
    assert (bench.num_sets(case), bench.is_cold(case)) == (sets, cold)


def test_chain_calls_every_set_in_every_turn_and_keeps_the_last_results():
    def call(link, state, fixed):
        return 2 * link + fixed, state + 1, link + 0.5

    states, sets = [jnp.int32(0), jnp.int32(5)], [jnp.float32(1), jnp.float32(10)]
    link, states, results = jax.jit(bench.chain(call, 2))(jnp.float32(0), states, sets)
    # 0 -> 1 -> 12 -> 25 -> 60; in the second turn the links are 12 and 25.
    assert float(link) == 60.0
    assert [int(state) for state in states] == [2, 7]
    assert [float(result) for result in results] == [12.5, 25.5]


def run(case, scored, implementation, calls=3):
    """The links, states and results of a few calls on the same operands."""
    call = jax.jit(case.call(implementation, scored))
    link, (state, fixed) = case.link(), case.inputs(0)
    results = None
    for _ in range(calls):
        link, state, results = call(link, state, fixed)
    return link, state, results


@pytest.mark.parametrize("name", SMALL)
def test_every_implementation_is_timed_at_the_same_work(name):
    case = SMALL[name]
    for scored in case.scorings:
        jax.tree.map(
            np.testing.assert_array_equal, run(case, scored, None), run(case, scored, "xla")
        )


def test_evict_evicts_once_and_then_finds_nothing_to_do():
    link, (_, positions), _ = run(SMALL["evict"], True, None)
    assert ((positions < 0).sum(axis=1) == 1).all()
    assert not link.any()


def test_compact_gathers_a_tenth():
    link, _, (keys, values) = run(SMALL["compact"], True, None)
    _, (all_keys, all_values, _) = SMALL["compact"].inputs(0)
    assert keys.shape == (2, 3, 64, 64)
    np.testing.assert_array_equal(keys, all_keys[:, :, :192:3])
    np.testing.assert_array_equal(values, all_values[:, :, :192:3])
    assert int(link) == 0


def test_operands_are_prepared_anew_in_every_call():
    """XLA may not mask the values once for all calls: decoding cannot, either."""
    case = SMALL["decode_attention"]
    inputs = [case.inputs(i) for i in range(2)]
    program = jax.jit(bench.chain(case.call("xla", True), 5))
    lowered = program.lower(case.link(), [s for s, _ in inputs], [f for _, f in inputs])
    before, _, body = lowered.as_text().partition("stablehlo.while")
    assert body.count("stablehlo.optimization_barrier") == 2  # one a set
    assert "stablehlo.optimization_barrier" not in before


def test_noise_is_spread_and_differs_by_seed():
    first, second = (np.asarray(bench.noise((2, 3, 50, 4), jnp.float32, s)) for s in (1, 2))
    assert np.array_equal(first[0], first[1])
    assert abs(first.mean()) < 0.1
    assert 0.5 < first.std() < 0.65  # uniform in [-1, 1): 0.577
    assert abs(first).max() <= 1
    assert abs(first - second).mean() > 0.3


@pytest.mark.parametrize(
    ("case", "platform", "kernel"),
    [
        (LLAMA, "cpu", "xla"),
        (LLAMA, "tpu", "tpu_custom_call"),
        (SMALL["evict"], "tpu", "tpu_custom_call"),
        (SMALL["compact"], "tpu", "xla"),
    ],
    ids=lambda value: getattr(value, "kernel", value),
)
def test_kernel_is_read_from_the_program(case, platform, kernel):
    link, (state, fixed) = jax.eval_shape(lambda: (case.link(), case.inputs(0)))
    program = jax.jit(bench.chain(case.call(None, True), 1))
    lowered = program.trace(link, [state], [fixed]).lower(lowering_platforms=(platform,))
    assert bench.kernel_in(lowered.as_text()) == kernel


def test_report_of_times_written_down():
    measured = Measured(
        runs_as="tpu_custom_call",
        calls=12,
        seconds={True: [0.0005, 0.0004, 0.0009], False: [0.0004] * 3},
        xla_seconds={True: [0.001] * 3, False: [0.0008] * 3},
        copy_bytes_per_second=[2e12, 1.5e12, 4e12],
    )
    row = reports.row(LLAMA, measured)
    found = row["scored"]
    assert found["ms"] == {"median": 0.5, "min": 0.4, "max": 0.9, "all": [0.5, 0.4, 0.9]}
    assert found["bytes_moved"] == 541_327_360
    assert found["bytes_per_second"] == pytest.approx(1.08265e12, rel=1e-5)
    assert found["bandwidth_fraction"] == pytest.approx(0.541327, rel=1e-5)
    assert row["scored_over_unscored"] == 1.25
    assert row["speedup_over_xla"] == 2.0
    assert row["xla"]["unscored"]["ms"]["median"] == 0.8
    assert cells(row) == [
        *("decode_attention", "llama-3.1-8b", "8", "16,384", "0.5", "0.4", "1.250", "541.3"),
        *("1082.7", "54%", "1", "2.00"),
    ]


def test_report_of_what_has_no_unscored_step_and_no_kernel():
    measured = Measured(
        runs_as="xla",
        calls=12,
        seconds={True: [0.001] * 3},
        xla_seconds={True: [0.003] * 3},
        copy_bytes_per_second=[1e12] * 3,
    )
    case = compact.Case(LLAMA_3_1_8B, 8, 65536, "bfloat16")
    assert cells(reports.row(case, measured)) == [
        *("compact", "llama-3.1-8b", "8", "65,536", "1", "-", "-", "432.2", "432.2", "43%"),
        *("3", "3.00"),
    ]


def cells(row):
    """The first line of the table of one row."""
    return [next(iter(column.cells)) for column in reports.kernel_table([row]).columns]


def test_bench_kernels_writes_what_it_measured(inertiakv, tmp_path):
    path = tmp_path / "kernels.json"
    done = inertiakv("bench", "kernels", *TINY, "--json", path)
    assert done.code == 0, done.err
    measured = json.loads(path.read_text())
    assert set(measured) == {"date", "device", "versions", "settings", "results", "skipped"}
    assert measured["settings"] == {"dtype": "bfloat16", "implementation": None, "repeats": 2}
    assert measured["versions"]["jax"] == jax.__version__
    assert measured["device"]["kind"] == "cpu"
    assert measured["skipped"] == []
    rows = measured["results"]
    assert [(row["kernel"], row["shape"], row["dtype"]) for row in rows] == [
        ("decode_attention", "smollm2-135m", "bfloat16"),
        ("evict", "shared", "float32"),
        ("evict", "smollm2-135m", "float32"),
        ("compact", "smollm2-135m", "bfloat16"),
    ]
    common = {
        *("kernel", "shape", "batch", "slots", "dtype", "runs_as", "calls", "operand_sets"),
        *("scored", "unscored", "scored_over_unscored", "xla", "speedup_over_xla"),
        *("copy_bytes_per_second", "cold"),
    }
    attention, shared, _, shrunk = rows
    assert set(attention) == common | {"heads", "kv_heads", "head_dim"}
    assert set(shared) == common | {"kv_heads"}
    assert set(shrunk) == common | {"kv_heads", "head_dim", "kept_slots"}
    for row in rows:
        assert (row["batch"], row["slots"], row["runs_as"]) == (2, 24, "xla")
        assert (row["calls"], row["operand_sets"]) == (6, 2)
        for name in ("scored", "unscored"):
            if row[name] is not None:
                figures = {"ms", "bytes_moved", "bytes_per_second", "bandwidth_fraction"}
                assert set(row[name]) == figures
                assert len(row[name]["ms"]["all"]) == 2
                assert min(row[name]["ms"]["all"]) > 0
        assert (row["unscored"] is None) == (row is shrunk)
        # What ran is the reference itself, except for the gather.
        assert (row["xla"] is None) == (row is not shrunk)
        assert min(row["copy_bytes_per_second"]["all"]) > 0
    assert shrunk["xla"]["scored"]["bytes_moved"] == shrunk["scored"]["bytes_moved"]
    heading, line = done.out.splitlines()[:2]
    assert heading.split() == " ".join(reports.HEADINGS).split()
    assert line.split()[:4] == ["decode_attention", "smollm2-135m", "2", "24"]
    assert "On a CPU no kernel runs: what has no XLA ms is itself the reference" in done.out
    assert list(tmp_path.iterdir()) == [path]


def test_defaults_on_a_cpu_are_small(inertiakv, monkeypatch):
    seen = []

    def measure(case, *, implementation, repeats):
        assert (implementation, repeats) == (None, 5)
        seen.append((case.kernel, case.name, case.slots, case.batch))
        seconds = {scored: [1.0] for scored in case.scorings}
        return Measured("xla", 1, seconds, {}, [1.0])

    monkeypatch.setattr(bench, "measure", measure)
    assert inertiakv("bench", "kernels").code == 0
    names = ("llama-3.1-8b", "llama-3.3-70b/8", "qwen2.5-7b", "smollm2-135m")
    assert seen == [
        (kernel, name, slots, 1)
        for kernel in ("decode_attention", "evict", "compact")
        for name in (("shared",) if kernel == "evict" else ()) + names
        for slots in (1024, 6402)
    ]


@pytest.mark.parametrize("kernel", ["decode_attention", "evict", "compact"])
def test_kernels_can_be_chosen(kernel, inertiakv, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "measure", lambda case, **_: seen.append(case.kernel) or "no time")
    assert inertiakv("bench", "kernels", *TINY, "--kernels", kernel).code == 0
    assert set(seen) == {kernel}


def test_what_lacks_the_implementation_is_left_out(inertiakv, monkeypatch):
    def measure(case, *, implementation, repeats):
        assert implementation == "tpu"
        if case.name == "smollm2-135m":
            raise ValueError("3 kv heads do not fill a tile")
        return Measured("tpu_custom_call", 1, {True: [1.0], False: [1.0]}, {}, [1.0])

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench_kernels, "_platform", lambda: "tpu")
    done = inertiakv("bench", "kernels", *TINY, "--implementation", "tpu")
    assert done.code == 0, done.err
    out = " ".join(done.out.split())
    assert "evict smollm2-135m, batch 2, 24 slots left out: 3 kv heads do not fill a tile" in out
    assert "compact smollm2-135m, batch 2, 24 slots left out: it has no implementation" in out
    assert done.out.splitlines()[1].split()[:2] == ["evict", "shared"]


def test_what_does_not_fit_is_left_out_with_a_word(inertiakv, monkeypatch, tmp_path):
    monkeypatch.setattr(reports, "device_memory", lambda: 16 * 2**30)
    path = tmp_path / "kernels.json"
    sizes = ["--slots", 65536, 24, "--batch", 32, "--repeats", 1]
    only = ["--kernels", "decode_attention", "--shapes", "llama-3.1-8b"]
    done = inertiakv("bench", "kernels", *only, *sizes, "--json", path)
    assert done.code == 0, done.err
    # Keys and values are 8 GiB, and 16 in float32.
    assert "llama-3.1-8b, batch 32, 65,536 slots left out: needs about 24.0 GiB of 16.0" in done.out
    measured = json.loads(path.read_text())
    assert [row["slots"] for row in measured["results"]] == [24]
    assert [row["slots"] for row in measured["skipped"]] == [65536]


def test_memory_that_runs_out_is_told(inertiakv, monkeypatch):
    def exhaust(case, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte too many")

    monkeypatch.setattr(bench, "measure", exhaust)
    done = inertiakv("bench", "kernels", *TINY)
    assert done.code == 0, done.err
    assert "24 slots left out: the device's memory ran out" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "gpt-2"], "unknown shape 'gpt-2': expected one of llama-3.1-8b, "),
        (["--kernels", "gemm"], "unknown kernel 'gemm': expected one of decode_attention, evict, "),
        (["--slots", "0"], "--slots must be at least 1, got 0"),
        (["--batch", "4", "-1"], "--batch must be at least 1, got -1"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--implementation", "cuda"], "implementation must be None or one of xla, "),
        (["--implementation", "tpu"], "implementation 'tpu' needs a TPU, "),
        (["--json", "nowhere/kernels.json"], "the folder nowhere does not exist"),
    ],
)
def test_bad_input_is_told_before_anything_runs(arguments, message, inertiakv, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("it ran"))
    done = inertiakv("bench", "kernels", *arguments)
    assert done.code == 2
    assert f"error: {message}" in done.err or message in done.err


def test_kernel_that_cannot_run_here_is_refused_before_it_is_compiled():
    with pytest.raises(ValueError, match=r"^implementation 'gpu' needs an NVIDIA GPU"):
        bench.measure(LLAMA, implementation="gpu", repeats=1)
    with pytest.raises(ValueError, match=r"^implementation must be None or one of xla, tpu"):
        bench.measure(SMALL["evict"], implementation="gpu", repeats=1)


def test_options_of_bench_are_not_those_of_kernels(inertiakv):
    done = inertiakv("bench", "--ratio", "0.5", "kernels")
    assert done.code == 2
    assert "options of `bench kernels` come after the word kernels" in done.err


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.run(["bench", "kernels", "--help"])
    assert exit_.value.code == 0
    assert "\n  inertiakv bench kernels --" in capsys.readouterr().out.partition("Example")[2]
