"""Eight devices against one, and what is said of a mesh before anything is computed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from evaluation.tiny import write_tiny
from jax.sharding import AbstractMesh, Mesh
from mesh.eight_devices import CONFIGS, EIGHT_DEVICES, POLICIES, QUICK_TO_COMPILE, REAL

import inertiakv_jax as ikv
from inertiakv_jax.methods import METHODS
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.prompt_input import filled_up
from inertiakv_jax.sharding import check_batch, layout, repeats

HERE = Path(__file__).parent
# Every policy, each family, each way to divide eight devices; what stands together shares programs.
CASES = (
    *(f"llama data=4,model=2 {policy}" for policy in ("inertiakv", "single-step", "cumulative")),
    *(f"smollm2 data=2,model=4 {policy}" for policy in ("tova", "lazy4", "score-free")),
    *(f"qwen2 model=8 {policy}" for policy in ("entropy", "knorm")),
    *(f"qwen3 data=8 {policy}" for policy in ("random", "vnorm", "kvzip")),
    "qwen3 data=2,context=2,model=2 learned",
    *(
        f"qwen3-moe data=2,expert=2,model=2 {policy}"
        for policy in ("keydiff", "recency", "streaming-llm")
    ),
    "mistral data=2,model=4 snapkv",
    "gemma2 data=4,model=2 adakv-ea",
    "gemma3 model=8 h2o",
)


@pytest.fixture(scope="module")
def results():
    """By case: whether tokens and positions are one device's, and how far scores are apart."""
    return by_case(compared(CASES))


def compared(cases):
    return on_eight_devices(
        HERE / "eight_devices.py", text="\n".join(cases), flags=QUICK_TO_COMPILE
    )


def by_case(done):
    return {result["case"]: result for result in map(json.loads, done.stdout.splitlines())}


def on_eight_devices(*arguments, text=None, flags=""):
    """Run Python on eight devices that are none."""
    flags = f"{EIGHT_DEVICES} {flags}"
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done


def check(result):
    assert result["evicted"]
    assert result["tokens"]
    assert result["positions"]
    assert result["scores"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_eight_devices_keep_and_say_what_one_does(results, case):
    check(results[case])


def test_cases_have_every_policy_and_family():
    assert {case.split()[0] for case in CASES} == set(CONFIGS)
    named = {policy for policy in POLICIES if "=" not in policy and "+" not in policy}
    assert {case.split()[2] for case in CASES} == named
    assert named == set(METHODS) - {"full"} | {"lazy4"}


def test_a_prompt_is_continued_alike_by_rows_that_are_added(tmp_path):
    """Two kv heads over two devices, one row over four."""
    folder, prompt = write_tiny(tmp_path / "tiny"), "the thin in the 12"
    done = on_eight_devices(
        *("-m", "inertiakv_jax", "generate", prompt, "--raw", "--model", folder),
        *("--mesh", "data=4,model=2", "--ratio", "0.5", "--max-new-tokens", "20", "--json"),
    )
    expected = ikv.generate(ikv.load(folder), [prompt], ratio=0.5, max_new_tokens=20)
    said = json.loads(done.stdout)
    assert said["tokens"] == expected.tokens[0]
    assert said["stats"]["kept_tokens"] == expected.stats.kept_tokens[0]
    assert "Mesh data=4,model=2: 3 more rows for each batch of 1" in done.stderr


@pytest.mark.slow
@pytest.mark.real_weights
def test_smollm2_on_meshes_that_do_not_divide_its_heads(smollm2):
    """Nine query heads and three kv heads; three prompts, to which four devices want a fourth."""
    cases = [f"{REAL} {mesh} inertiakv" for mesh in ("data=4,model=2", "model=8")]
    done = compared(cases)
    found = by_case(done)
    for case in cases:
        check(found[case])
    assert "8 devices share 3 kv heads and 9 query heads: 8 devices compute the same attention" in (
        done.stderr
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,model=4", "needs 8 devices, but there are 1"),
        ("rows=2", "unknown axis 'rows'; expected some of data, context, expert, model"),
        ("model", "model must be an integer of at least 1, got ''"),
        ("data=0", "data must be an integer of at least 1, got '0'"),
        ("data=2,data=4", "mesh 'data=2,data=4': data is named twice"),
        ("", "unknown axis ''"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        ikv.make_mesh(text)


def test_unknown_axes_of_a_mesh_are_named():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    with pytest.raises(ValueError, match=r"unknown axes \['tensor'\]; expected some of data, con"):
        layout(mesh, DecoderModel(CONFIGS["llama"]))


def test_a_batch_is_filled_up_with_its_last_row():
    mesh = AbstractMesh((4, 2), ("data", "model"))
    tokens, lengths = filled_up(np.array([[1, 2], [3, 0]]), np.array([2, 1]), mesh)
    assert tokens.tolist() == [[1, 2], [3, 0], [3, 0], [3, 0]]
    assert lengths.tolist() == [2, 1, 1, 1]
    with pytest.raises(ValueError, match="a batch of 6 must be divisible by mesh axis 'data', 4"):
        check_batch(mesh, 6)


def test_repeated_work_is_said():
    def said(name, devices):
        mesh = AbstractMesh((devices,), ("model",))
        return repeats(mesh, DecoderModel(CONFIGS[name]))

    assert said("qwen3", 8) is None
    assert said("llama", 4) == (
        "4 devices share 2 kv heads and 4 query heads: 2 devices have a copy of each kv head"
    )
    assert said("smollm2", 8) == (
        "8 devices share 3 kv heads and 9 query heads: 8 devices compute the same attention"
    )
