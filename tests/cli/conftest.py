"""A tiny random model in a folder, and the command line run in this process."""

import dataclasses
import json

import pytest
from weights.tiny_files import LLAMA, hf_tensors, write_folder

from inertiakv_jax.cli import run

CONFIG = LLAMA | {"max_position_embeddings": 2048, "tie_word_embeddings": False}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def write_model(folder, config=CONFIG, *, chat=True, nan_in=None):
    """A loadable folder; ``nan_in`` names a tensor that has no sound number."""
    # Small weights: a model of large ones repeats one token, whatever it is asked.
    tensors = {name: 0.2 * array for name, array in hf_tensors(config).items()}
    if nan_in is not None:
        tensors[nan_in][:] = float("nan")
    write_folder(folder, config, tensors)
    if chat:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}
        path.write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of a tiny Llama with a chat template and 2,048 positions."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def inertiakv(capsys, monkeypatch):
    """Runs a command line and returns its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("INERTIAKV_DEBUG", raising=False)

    def run_it(*arguments):
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run_it
