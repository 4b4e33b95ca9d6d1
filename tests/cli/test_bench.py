"""``inertiakv bench``: turns, figures, JSON, and the peers' weights."""

import dataclasses
import importlib.util
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli.conftest import CONFIG, write_model
from weights.tiny_files import SIZES, write_tokenizer_json

import inertiakv_jax as ikv
from inertiakv_jax import bench, bench_peers
from inertiakv_jax.bench import PolicyContestant, Run, take_turns
from inertiakv_jax.commands import bench_report


@pytest.fixture(scope="module")
def lm(tiny_model):
    return ikv.load(tiny_model)


def a_run(**changes) -> Run:
    fields = {"prefill_s": 2.0, "first_step_s": 0.5, "decode_s": 0.8, "tokens": [5, 6, 7, 8, 9, 1]}
    fields |= {"held_tokens": 10, "cache_slots": 64, "kv_bytes": 2**20}
    return Run(**(fields | changes))


@dataclasses.dataclass
class Scripted:
    """A contestant whose runs are written down."""

    name: str
    runs: list
    log: list
    library: str = "none"

    def __call__(self, prompt, new_tokens):
        self.log.append((self.name, list(prompt), new_tokens))
        return self.runs[sum(name == self.name for name, *_ in self.log) - 1]


def test_contestants_take_turns_and_the_first_round_does_not_count():
    log, told = [], []
    contestants = [Scripted("a", ["a0", "a1", "a2"], log), Scripted("b", ["b0", "b1", "b2"], log)]
    runs = take_turns(contestants, [3, 4], new_tokens=5, repeats=2, on_progress=told.append)
    assert runs == [["a1", "a2"], ["b1", "b2"]]
    assert [name for name, *_ in log] == ["a", "b", "a", "b", "a", "b"]
    assert log[0] == ("a", [3, 4], 5)
    assert told == [
        "warming up: a",
        "warming up: b",
        "round 1 of 2: a",
        "round 1 of 2: b",
        "round 2 of 2: a",
        "round 2 of 2: b",
    ]


def test_report_of_runs_written_down(lm):
    contestants = [Scripted(name, [], []) for name in ("full", "lazy4", "transformers")]
    runs = [
        [a_run(decode_s=0.8), a_run(decode_s=0.4, prefill_s=3.0), a_run(decode_s=1.2)],
        [a_run(decode_s=0.2, tokens=[5, 6, 7, 1, 1, 1])] * 3,
        [a_run(decode_s=1.6, prefill_s=4.0)] * 3,
    ]
    measured = bench_report.report(lm, contestants, runs, {"dtype": "float32"}, {"kvpress": "gone"})
    full, lazy, theirs = measured["results"]
    # Six tokens: the prefill's, step 1's, and four of the steps timed: 0.8 s are 200 ms each.
    assert full["decode_ms_per_token"] == {
        "median": 200.0,
        "min": 100.0,
        "max": 300.0,
        "all": [200.0, 100.0, 300.0],
    }
    assert full["prefill_s"]["median"] == 2.0
    assert full["first_step_ms"]["median"] == 500.0
    assert full["decode_tokens_per_s"] == 5.0
    assert full["speedup_over"] == {"transformers": {"prefill": 2.0, "decode": 2.0}}
    assert lazy["speedup_over"]["full"] == {"prefill": 1.0, "decode": 4.0}
    assert lazy["speedup_over"]["transformers"] == {"prefill": 2.0, "decode": 8.0}
    assert theirs["speedup_over"] == {"full": {"prefill": 0.5, "decode": 0.5}}
    assert [row["tokens_as_full"] for row in measured["results"]] == [6, 3, 6]
    assert measured["skipped"] == {"kvpress": "gone"}


@pytest.mark.parametrize("length", [1, 100, 1500])
def test_prompt_has_the_length_asked_for(lm, length):
    prompt = bench.prompt_of(lm, length)
    assert len(prompt) == length
    assert prompt == bench.prompt_of(lm, length)
    assert "special magic" not in lm.tokenizer.decode(prompt)[:20]


@pytest.mark.parametrize(
    ("policy", "new_tokens"),
    [(name, count) for name in ("full", "inertiakv") for count in (3, 16, 20)]
    + [("tova", 3), ("inertiakv,retention=per_head", 3)],
)
def test_tokens_are_those_of_generate(lm, policy, new_tokens):
    policy = ikv.policies.by_name(policy, ratio=0.5)
    prompt = bench.prompt_of(lm, 150)
    run = PolicyContestant(lm, policy)(prompt, new_tokens)
    out = ikv.generate(
        lm, [prompt], policy=policy, max_new_tokens=new_tokens + 2, stop_at_eos=False
    )
    assert run.tokens == out.tokens[0]
    assert run.held_tokens == (150 + new_tokens + 1 if policy.name == "full" else 75)
    assert min(run.prefill_s, run.first_step_s, run.decode_s) > 0


def test_bench_writes_what_it_measured(inertiakv, tiny_model, tmp_path):
    path = tmp_path / "bench.json"
    sizes = ["--prompt-tokens", 100, "--new-tokens", 5, "--repeats", 2, "--ratio", 0.5]
    done = inertiakv("bench", "--model", tiny_model, *sizes, "--json", path)
    assert done.code == 0, done.err
    measured = json.loads(path.read_text())
    assert set(measured) == {
        *("date", "model", "shape", "device", "versions", "settings", "results", "skipped"),
    }
    assert measured["settings"] == {
        "batch": 1,
        "dtype": "float32",
        "mesh": None,
        "prompt_tokens": 100,
        "new_tokens": 5,
        "repeats": 2,
        "ratio": 0.5,
        "implementation": None,
    }
    assert measured["shape"] == {
        "layers": 2,
        "hidden_size": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocabulary": 300,
    }
    assert measured["versions"]["jax"] == jax.__version__
    device = measured["device"]
    assert device["platform"] == "cpu"
    assert device["threads"] >= 1
    rows = {row["name"]: row for row in measured["results"]}
    assert list(rows) == ["full", "inertiakv", "lazy4", "score-free"]
    assert [row["held_tokens"] for row in rows.values()] == [106, 50, 50, 50]
    assert rows["lazy4"]["cache_slots"] == 64
    assert rows["lazy4"]["kv_bytes"] == 64 * 2 * 2 * 2 * 16 * 4
    assert all(len(row["prefill_s"]["all"]) == 2 for row in rows.values())
    assert rows["score-free"]["speedup_over"]["full"]["decode"] == pytest.approx(
        rows["full"]["decode_ms_per_token"]["median"]
        / rows["score-free"]["decode_ms_per_token"]["median"]
    )
    first_table = done.out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first_table[1:]] == list(rows)
    assert "\nMedians of 2 rounds in turns (least-most). " in done.out
    assert "Batch 1, a prompt of 100 tokens" in done.out
    second_table = done.out.split("\n\n")[1].splitlines()
    assert [line.split() for line in second_table[:2]] == [
        ["times", "as", "fast", "as", "full"],
        ["prefill", "decode"],
    ]
    assert [line.split()[0] for line in second_table[2:]] == list(rows)
    assert second_table[2].split() == ["full", "-", "-"]
    ratio = rows["lazy4"]["speedup_over"]["full"]
    assert second_table[4].split() == [
        *("lazy4", f"{ratio['prefill']:.2f}", f"{ratio['decode']:.2f}")
    ]
    assert "float32" in done.out
    assert list(tmp_path.iterdir()) == [path]


def test_policies_have_their_own_budgets_and_names(inertiakv, tiny_model, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: lazy4\ntokens: 11\n")
    names = ["full", "inertiakv", "inertiakv,tokens=7", str(path)]
    sizes = ["--prompt-tokens", 40, "--new-tokens", 3, "--repeats", 1, "--ratio", 0.5]
    out = tmp_path / "bench.json"
    done = inertiakv("bench", "--model", tiny_model, *sizes, "--json", out, "--policies", *names)
    assert done.code == 0, done.err
    rows = json.loads(out.read_text())["results"]
    assert [row["name"] for row in rows] == names
    assert [row["held_tokens"] for row in rows] == [44, 20, 7, 11]


def test_peers_that_are_not_installed_are_left_out_with_a_word(inertiakv, tiny_model, monkeypatch):
    gone, find = ("torch", "kvpress"), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else find(name)
    )
    sizes = ["--prompt-tokens", 40, "--new-tokens", 2, "--repeats", 1, "--policies", "full"]
    done = inertiakv("bench", "--model", tiny_model, *sizes, "--peer", "kvpress")
    assert done.code == 0
    reason = "torch and kvpress not installed: pip install 'inertiakv-jax[peers]'"
    first, loading, *_ = done.err.splitlines()
    assert (first, loading) == (f"kvpress left out: {reason}", f"Loading {tiny_model}")
    assert f"kvpress left out: {reason}" in done.out
    assert "\nOne round. " in done.out
    done = inertiakv("bench", "--model", "no/such/place", "--policies", "--peer", "kvpress")
    assert done.code == 2
    assert "error: nothing to time: --policies is empty, and every peer left out" in done.err


def test_peers_run_on_the_cpu_only(monkeypatch):
    pytest.importorskip("torch", reason="needs torch (extra 'peers')")
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5e")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert bench_peers.why_not("transformers") == (
        "runs on the CPU, and jax on TPU v5e: no comparison"
    )


def test_busy_machine_is_told(lm, capsys):
    contestant = Scripted("full", [], [])
    settings = {"dtype": "float32", "repeats": 1, "prompt_tokens": 9, "new_tokens": 4, "ratio": 0.9}
    for busy, told in ((1.7, True), (0.1, False), (None, False)):
        measured = bench_report.report(lm, [contestant], [[a_run()]], settings, {})
        measured["device"]["cpus_busy_before"] = busy
        bench_report.print_report(measured)
        out = " ".join(capsys.readouterr().out.split())
        assert ("Other programs kept 1.7 of" in out) is told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "full", "best"], "unknown policy 'best'"),
        (["--ratio", "1"], "ratio must be a number in [0, 1), got 1.0"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be at least 1, got 0"),
        (["--new-tokens", "0"], "--new-tokens must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--prompt-tokens", "2048"], "exceed the model's 2048 positions"),
        (["--policies"], "nothing to time"),
        (["--policies", "tova", "tova"], "--policies must differ, got tova tova"),
        (["--mesh", "heads=2"], "unknown axis 'heads'"),
        (["--json", "no/folder/b.json"], "the folder no/folder does not exist"),
    ],
)
def test_bad_input(arguments, message, inertiakv, tiny_model):
    done = inertiakv("bench", "--model", tiny_model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama-tied": {"tie_word_embeddings": True},
    "llama3-untied": {"tie_word_embeddings": False, "rope_scaling": LLAMA3_SCALING},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "mistral": {"model_type": "mistral", "architectures": None, "sliding_window": None},
}


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peer_has_our_weights(family, dtype, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
    lm = ikv.load(write_model(tmp_path / "model", CONFIG | FAMILIES[family]), dtype=dtype)
    compare_logits(lm, torch)


@pytest.mark.torch
def test_peer_has_our_biases(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**(SIZES | {"tie_word_embeddings": True}))
    model = transformers.Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    compare_logits(ikv.load(tmp_path), torch)


def compare_logits(lm, torch):
    prompt = np.random.default_rng(0).integers(0, 300, (1, 90))
    _, ours = ikv.prefill(
        lm.model, lm.params, prompt, np.array([90]), ikv.policies.full(), max_new_tokens=1
    )
    model = bench_peers.torch_model(lm)
    assert model.dtype == getattr(torch, lm.model.dtype)
    with torch.inference_mode():
        theirs = model(torch.from_numpy(prompt)).logits[:, -1].float().numpy()
    scale = np.abs(theirs).max()
    error = np.abs(np.asarray(ours) - theirs).max() / scale
    # Observed: 6e-7 in float32, 9e-3 in bfloat16; a wrong frequency or weight gives above 0.1.
    assert error < (3e-6 if lm.model.dtype == jnp.float32 else 3e-2)


@pytest.mark.torch
def test_peers_in_a_bench(inertiakv, tiny_model, tmp_path):
    pytest.importorskip("torch", reason="needs torch (extra 'peers')")
    pytest.importorskip("kvpress", reason="needs kvpress (extra 'peers')")
    path = tmp_path / "bench.json"
    sizes = ["--prompt-tokens", 100, "--new-tokens", 5, "--repeats", 1, "--policies", "full"]
    peers = ["--peer", "transformers", "--peer", "kvpress"]
    done = inertiakv("bench", "--model", tiny_model, *sizes, *peers, "--json", path)
    assert done.code == 0, done.err
    measured = json.loads(path.read_text())
    full, theirs, press = measured["results"]
    assert [row["name"] for row in measured["results"]] == ["full", "transformers", "kvpress-tova"]
    assert theirs["tokens_as_full"] == 7  # of the prefill, step 1 and five more
    assert [full["held_tokens"], theirs["held_tokens"], press["held_tokens"]] == [106, 106, 10]
    assert theirs["kv_bytes"] == 106 * 2 * 2 * 2 * 16 * 4
    assert set(full["speedup_over"]) == {"transformers", "kvpress-tova"}
    assert measured["skipped"] == {}
    assert measured["versions"]["torch"]
