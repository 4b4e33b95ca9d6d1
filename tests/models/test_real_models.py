"""Real models in GGUF files: against transformers, by way of the safetensors made of them.

The files are looked for in the folder that INERTIAKV_TEST_MODELS names, else in ``.models``.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT
from models.test_against_transformers import NEW_TOKENS, prefilled, theirs_of
from models.test_smollm2 import prompt

import inertiakv_jax as ikv
from inertiakv_jax import policies
from inertiakv_jax.weights.hf_export import save_safetensors

pytestmark = [pytest.mark.torch, pytest.mark.slow]

torch = pytest.importorskip("torch", reason="needs torch (extra 'peers')")

MODELS = Path(os.environ.get("INERTIAKV_TEST_MODELS", ROOT / ".models"))
# Name: parameters, and the greatest difference of logits (float32) that was observed.
CASES = {
    "gemma3-270m": (268_098_176, 1e-4),
    "qwen2.5-coder-0.5b": (630_167_424, 1e-4),
    "qwen2.5-coder-1.5b": (1_777_088_000, 1e-4),
}


@pytest.mark.parametrize("name", CASES)
def test_against_transformers(tmp_path, name):
    import transformers

    path = MODELS / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {MODELS}")
    parameters, tolerance = CASES[name]
    lm = ikv.load(path)
    assert sum(leaf.size for leaf in jax.tree.leaves(lm.params)) == parameters
    save_safetensors(lm, tmp_path / "folder")
    rows = [prompt(lm.tokenizer, 600)]
    state, logits = prefilled(lm, rows)
    first = logits.argmax(axis=-1)
    _, tokens = ikv.decode(
        lm.model, lm.params, state, first, steps=NEW_TOKENS - 1, policy=policies.full()
    )
    answer = np.concatenate([first[:, None], tokens], axis=1).tolist()
    config, vocabulary = lm.config, lm.tokenizer
    params = lm.params
    del lm, state
    again = ikv.load(tmp_path / "folder")
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    del again, params
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected, expected_tokens = theirs_of(theirs, rows)
    np.testing.assert_allclose(logits, expected, atol=10 * tolerance)
    assert answer == expected_tokens
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("12  x = 3\n").input_ids == vocabulary("12  x = 3\n").input_ids
