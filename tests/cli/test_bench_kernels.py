"""``inertiakv bench kernels``: what is counted, what is timed, the table and the JSON."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inertiakv_jax import cli
from inertiakv_jax.commands import bench_kernels_report as reports
from inertiakv_jax.pallas_kernels.decode_attention import bench
from inertiakv_jax.pallas_kernels.decode_attention.api import decode_attention
from inertiakv_jax.pallas_kernels.decode_attention.bench import Case, Measured
from inertiakv_jax.pallas_kernels.decode_attention.shapes import LLAMA_3_1_8B, SMOLLM2_135M

LLAMA = Case(LLAMA_3_1_8B, batch=8, slots=16384, dtype="bfloat16")
TINY = ["--shapes", "smollm2-135m", "--slots", "24", "--batch", "2", "--repeats", "2"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A copy and calls that take no time to speak of."""
    monkeypatch.setattr(bench, "_COPIED_BYTES", 2**20)
    monkeypatch.setattr(bench, "_MOST_CACHES", 2)
    monkeypatch.setattr(bench, "_MOST_CALLS", 6)


def test_bytes_moved_are_each_operand_and_result_once():
    keys_and_values = 536_870_912  # 2 x 8 x 8 x 16,384 x 128 x 2 bytes
    query_and_output = 131_072  # 2 x 8 x 32 x 128 x 2 bytes
    mask = 131_072  # 8 x 16,384
    mass = 4_194_304  # 8 x 8 x 16,384 x 4 bytes
    assert LLAMA.kv_bytes == keys_and_values
    assert LLAMA.bytes_moved(False) == keys_and_values + query_and_output + mask
    assert LLAMA.bytes_moved(True) == keys_and_values + query_and_output + mask + mass


@pytest.mark.parametrize(
    ("slots", "caches", "cold"),
    [
        (65536, 1, True),  # 256 MiB
        (16384, 3, True),  # 64 MiB: two are 128 MiB, and no more than that
        (6402, 6, True),
        (1024, 16, False),  # 4 MiB: sixteen are 64 MiB
    ],
)
def test_caches_are_more_than_the_device_keeps(slots, caches, cold, monkeypatch):
    monkeypatch.setattr(bench, "_MOST_CACHES", 16)
    case = Case(LLAMA_3_1_8B, 1, slots, "bfloat16")
    assert (case.caches, case.cold) == (caches, cold)


def test_chain_calls_every_cache_in_every_turn_and_keeps_the_last_masses():
    def attend(query, keys, values, valid):
        del values, valid
        return 2 * query + keys, query + 0.5

    caches = [(jnp.float32(1), jnp.float32(0)), (jnp.float32(10), jnp.float32(0))]
    query, masses = jax.jit(bench.chain(attend, 2))(jnp.float32(0), caches, jnp.bool_(True))
    # 0 -> 1 -> 12 -> 25 -> 60; in the second turn the queries are 12 and 25.
    assert float(query) == 60.0
    assert [float(mass) for mass in masses] == [12.5, 25.5]


def test_cache_is_read_anew_in_every_call():
    """XLA may not mask the values once for all calls: decoding cannot, either."""
    attend = functools.partial(decode_attention, implementation="xla", return_mass=True)
    case = Case(SMOLLM2_135M, 1, 40, "float32")
    text = jax.jit(bench.chain(attend, 5)).lower(*bench._operands(case)).as_text()
    body = text[text.index("stablehlo.while") :]
    assert body.count("stablehlo.optimization_barrier") == 2  # one a cache
    assert "stablehlo.optimization_barrier" not in text[: text.index("stablehlo.while")]


def test_noise_is_spread_and_differs_by_seed():
    first, second = (np.asarray(bench._noise((2, 3, 50, 4), jnp.float32, s)) for s in (1, 2))
    assert np.array_equal(first[0], first[1])
    assert abs(first.mean()) < 0.1
    assert 0.5 < first.std() < 0.65  # uniform in [-1, 1): 0.577
    assert abs(first).max() <= 1
    assert abs(first - second).mean() > 0.3


@pytest.mark.parametrize(("platform", "kernel"), [("cpu", "xla"), ("tpu", "tpu_custom_call")])
def test_kernel_is_read_from_the_program(platform, kernel):
    operands = bench._operands(Case(LLAMA_3_1_8B, 1, 1024, "bfloat16"))
    program = jax.jit(bench.chain(decode_attention, 1))
    lowered = program.trace(*operands).lower(lowering_platforms=(platform,))
    assert bench.kernel_in(lowered.as_text()) == kernel


def test_report_of_times_written_down():
    measured = Measured(
        runs_as="tpu_custom_call",
        calls=12,
        with_mass=[0.0005, 0.0004, 0.0009],
        without_mass=[0.0004] * 3,
        xla_with_mass=[0.001] * 3,
        xla_without_mass=[0.0008] * 3,
        copy_bytes_per_second=[2e12, 1.5e12, 4e12],
    )
    row = reports.row(LLAMA, measured)
    found = row["with_mass"]
    assert found["ms"] == {"median": 0.5, "min": 0.4, "max": 0.9, "all": [0.5, 0.4, 0.9]}
    assert found["bytes_moved"] == 541_327_360
    assert found["bytes_per_second"] == pytest.approx(1.08265e12, rel=1e-5)
    assert found["bandwidth_fraction"] == pytest.approx(0.541327, rel=1e-5)
    assert row["with_over_without"] == 1.25
    assert row["speedup_over_xla"] == 2.0
    assert row["xla"]["without_mass"]["ms"]["median"] == 0.8
    table = reports.kernel_table([row])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == [
        *("llama-3.1-8b", "8", "16,384", "0.5", "0.4", "1.250", "541.3", "1082.7", "54%"),
        *("1", "2.00"),
    ]


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
    (row,) = measured["results"]
    figures = {"with_mass", "without_mass", "with_over_without", "xla", "speedup_over_xla"}
    facts = {"kernel", "shape", "heads", "kv_heads", "head_dim", "batch", "slots", "dtype"}
    assert set(row) == {
        *figures,
        *facts,
        *("runs_as", "copy_bytes_per_second", "calls", "kv_caches", "cold"),
    }
    assert (row["kernel"], row["shape"], row["runs_as"]) == (
        *("decode_attention", "smollm2-135m", "xla"),
    )
    assert (row["batch"], row["slots"], row["calls"], row["kv_caches"]) == (2, 24, 6, 2)
    assert row["xla"] is None
    for name in ("with_mass", "without_mass"):
        assert set(row[name]) == {"ms", "bytes_moved", "bytes_per_second", "bandwidth_fraction"}
        assert len(row[name]["ms"]["all"]) == 2
        assert min(row[name]["ms"]["all"]) > 0
    assert min(row["copy_bytes_per_second"]["all"]) > 0
    heading, line = done.out.splitlines()[:2]
    assert heading.split() == " ".join(reports.HEADINGS).split()
    assert line.split()[:3] == ["smollm2-135m", "2", "24"]
    assert "On a CPU no kernel runs: this is the reference" in done.out
    assert list(tmp_path.iterdir()) == [path]


def test_defaults_on_a_cpu_are_small(inertiakv, monkeypatch):
    seen = []

    def measure(case, *, implementation, repeats):
        assert (implementation, repeats) == (None, 5)
        seen.append((case.heads.name, case.slots, case.batch))
        return Measured("xla", 1, [1.0], [1.0], [], [], [1.0])

    monkeypatch.setattr(bench, "measure", measure)
    assert inertiakv("bench", "kernels").code == 0
    names = ("llama-3.1-8b", "llama-3.3-70b/8", "qwen2.5-7b", "smollm2-135m")
    assert seen == [(name, slots, 1) for name in names for slots in (1024, 6402)]


def test_what_does_not_fit_is_left_out_with_a_word(inertiakv, monkeypatch, tmp_path):
    monkeypatch.setattr(reports, "device_memory", lambda: 16 * 2**30)
    path = tmp_path / "kernels.json"
    sizes = ["--slots", 65536, 24, "--batch", 32, "--repeats", 1]
    done = inertiakv("bench", "kernels", "--shapes", "llama-3.1-8b", *sizes, "--json", path)
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
        (["--slots", "0"], "--slots must be at least 1, got 0"),
        (["--batch", "4", "-1"], "--batch must be at least 1, got -1"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--implementation", "cuda"], "implementation must be None or one of xla, "),
        (["--json", "nowhere/kernels.json"], "the folder nowhere does not exist"),
    ],
)
def test_bad_input_is_told_before_anything_runs(arguments, message, inertiakv, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("it ran"))
    done = inertiakv("bench", "kernels", *arguments)
    assert done.code == 2
    assert f"error: {message}" in done.err or message in done.err


def test_kernel_that_cannot_run_here_is_an_error(inertiakv):
    done = inertiakv("bench", "kernels", *TINY, "--implementation", "tpu")
    assert done.code == 2
    assert "error: " in done.err


def test_options_of_bench_are_not_those_of_kernels(inertiakv):
    done = inertiakv("bench", "--ratio", "0.5", "kernels")
    assert done.code == 2
    assert "options of `bench kernels` come after the word kernels" in done.err


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.run(["bench", "kernels", "--help"])
    assert exit_.value.code == 0
    assert "\n  inertiakv bench kernels --" in capsys.readouterr().out.partition("Example")[2]
