"""Hub ids, with ``snapshot_download`` replaced: which files, in which order, and which errors."""

import fnmatch
import json
import shutil

import huggingface_hub
import pytest
from huggingface_hub import errors
from weights.tiny_files import LLAMA, write_folder

from inertiakv_jax.weights.load import load


class FakeHub:
    """A repository in a folder; keeps what was asked for."""

    def __init__(self, repository, snapshot, error=None):
        self.repository, self.snapshot, self.error, self.calls = repository, snapshot, error, []

    def __call__(self, hub_id, *, revision, allow_patterns, ignore_patterns):
        self.calls.append((hub_id, revision))
        if self.error:
            raise self.error
        self.snapshot.mkdir(exist_ok=True)
        for path in sorted(self.repository.rglob("*")):
            name = path.relative_to(self.repository).as_posix()
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
            if wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                shutil.copy(path, self.snapshot / path.name)
        return str(self.snapshot)


@pytest.fixture
def repository(tmp_path):
    folder = write_folder(tmp_path / "repository")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"second copy")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "original").mkdir()
    (folder / "original" / "part.safetensors").write_bytes(b"third copy")
    return folder


def use(monkeypatch, tmp_path, repository, error=None):
    fake = FakeHub(repository, tmp_path / "snapshot", error)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_only_what_is_needed_is_fetched(monkeypatch, tmp_path, repository):
    fake = use(monkeypatch, tmp_path, repository)
    model = load("org/tiny-model.v1", revision="abc")
    assert model.name == "org/tiny-model.v1"
    assert {path.name for path in fake.snapshot.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert fake.calls == [("org/tiny-model.v1", "abc")] * 2


def test_unsupported_model_costs_no_download_of_weights(monkeypatch, tmp_path, repository):
    (repository / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mamba"}))
    fake = use(monkeypatch, tmp_path, repository)
    with pytest.raises(ValueError, match=r"'mamba' .*supported: llama, mistral, qwen2"):
        load("org/mamba")
    assert len(fake.calls) == 1
    assert not list(fake.snapshot.glob("*.safetensors"))


def test_repository_that_is_no_model(monkeypatch, tmp_path, repository):
    (repository / "config.json").unlink()
    use(monkeypatch, tmp_path, repository)
    with pytest.raises(ValueError, match=r"org/dataset has no config\.json"):
        load("org/dataset")


@pytest.mark.parametrize(
    ("kind", "raised", "words"),
    [
        (errors.GatedRepoError, ValueError, "org/x is gated: accept its terms"),
        (errors.RepositoryNotFoundError, ValueError, "org/x is not a public repository"),
        (errors.RevisionNotFoundError, ValueError, "org/x has no revision None"),
        (errors.LocalEntryNotFoundError, ConnectionError, "cannot download org/x from the hub"),
        (TimeoutError, ConnectionError, "cannot download org/x from the hub"),
    ],
)
def test_errors_say_what_to_do(monkeypatch, tmp_path, repository, kind, raised, words):
    # Their constructors want an HTTP response, which differs between versions.
    use(monkeypatch, tmp_path, repository, error=kind.__new__(kind))
    with pytest.raises(raised, match=words):
        load("org/x")


def test_a_folder_of_that_name_comes_first(monkeypatch, tmp_path, repository):
    fake = use(monkeypatch, tmp_path, repository)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    write_folder(tmp_path / "org" / "model")
    load("org/model")
    assert fake.calls == []
