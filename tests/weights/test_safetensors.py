"""Safetensors files put together by hand: read right, and refused before anything is allocated."""

import json
import struct

import numpy as np
import pytest
from weights.tiny_files import safetensors_bytes, with_header

from inertiakv_jax.weights.safetensors_files import INDEX_NAME, open_safetensors, read_header
from inertiakv_jax.weights.tensor_source import read_bytes, row_blocks

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2.0], np.float16),
}


def read(source, name):
    """All blocks of a tensor in one array."""
    result = np.full(source.shapes[name], np.nan)
    for rows, values in source.blocks(name):
        result[rows] = values
    return result


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_values_of_each_float_dtype(tmp_path):
    bfloat16 = struct.pack("<3H", 0x3F80, 0xC020, 0x0000)  # 1, -2.5, 0
    header = {
        "bf": entry("BF16", (3,), (0, 6)),
        "half": entry("F16", (1,), (6, 8)),
        "double": entry("F64", (1,), (8, 16)),
        "single": entry("F32", (1, 2), (16, 24)),
        "__metadata__": {"format": "pt"},
    }
    data = bfloat16 + struct.pack("<e", 0.5) + struct.pack("<d", 3.25) + struct.pack("<2f", 7, -8)
    (tmp_path / "model.safetensors").write_bytes(with_header(header, data))
    source = open_safetensors(tmp_path)
    assert source.shapes == {"bf": (3,), "half": (1,), "double": (1,), "single": (1, 2)}
    np.testing.assert_array_equal(read(source, "bf"), [1.0, -2.5, 0.0])
    np.testing.assert_array_equal(read(source, "half"), [0.5])
    np.testing.assert_array_equal(read(source, "double"), [3.25])
    np.testing.assert_array_equal(read(source, "single"), [[7.0, -8.0]])


def test_blocks_cover_every_row_once():
    # Rows of 300,000 numbers: 16 to a block, however large. Rows of 3: many.
    assert list(row_blocks((40, 300_000))) == [(0, 16), (16, 32), (32, 40)]
    assert list(row_blocks((50_000, 3))) == [(0, 21840), (21840, 43680), (43680, 50_000)]
    assert list(row_blocks((5,))) == [(0, 5)]
    assert list(row_blocks((0, 8))) == []


def test_tensors_larger_than_a_block(tmp_path):
    array = np.random.default_rng(0).normal(size=(1000, 700)).astype(np.float32)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"w": array}))
    source = open_safetensors(tmp_path)
    assert len(list(source.blocks("w"))) > 2
    np.testing.assert_array_equal(read(source, "w"), array)


GOOD = {"a": entry()}
DATA = bytes(24)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes"]),
        (b"\x07\0\0", ["3 bytes"]),
        (struct.pack("<Q", 1 << 60) + b"{}", ["header length 1152921504606846976"]),
        (with_header(GOOD, DATA)[:40], ["header length", "truncated"]),
        (with_header(GOOD, DATA)[:-1], ["'a'", "byte 24", "23", "truncated"]),
        (with_header(GOOD, DATA + b"x"), ["25 bytes of data", "24"]),
        (with_header(b"{nonsense", DATA), ["not valid JSON"]),
        (with_header(b"\xff\xfe", DATA), ["not valid JSON"]),
        (with_header(b"[" * 100_000, DATA), ["not valid JSON"]),
        (with_header(b"[]", DATA), ["not a JSON object"]),
        (with_header(b'{"a": {}, "a": {}}', DATA), ["a key appears twice"]),
        (with_header({"a": 5}, DATA), ["'a'", "expected an object"]),
        (with_header({"a": entry(dtype="Q9")}, DATA), ["'a'", "'Q9'", "BF16"]),
        (with_header({"a": entry(shape=(2, -3))}, DATA), ["'a'", "shape [2, -3]"]),
        (with_header({"a": entry(shape=(2.0, 3))}, DATA), ["'a'", "shape"]),
        (with_header({"a": entry(shape=(1 << 40, 1 << 40))}, DATA), ["'a'", "4835703278458516698"]),
        (with_header({"a": entry(offsets=(0, 20))}, DATA), ["'a'", "24 bytes", "20"]),
        (with_header({"a": entry(offsets=(24, 0))}, DATA), ["'a'", "24 bytes", "-24"]),
        (with_header({"a": entry(offsets=(0, 24, 48))}, DATA), ["'a'", "pair"]),
        (with_header({"a": entry(offsets=(4, 28))}, bytes(28)), ["'a'", "begins at byte 4"]),
        (with_header({"a": entry(), "b": entry()}, DATA), ["'b'", "expected 24"]),
    ],
)
def test_corrupt_files_are_refused_by_name(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors") as caught:
        read_header(path)
    for word in words:
        assert word in str(caught.value)


def test_integer_tensors_are_refused_when_read(tmp_path):
    header = {"ids": entry("I64", (1,), (0, 8))}
    (tmp_path / "model.safetensors").write_bytes(with_header(header, bytes(8)))
    source = open_safetensors(tmp_path)
    with pytest.raises(ValueError, match=r"'ids' has dtype I64; supported: F16, BF16, F32, F64"):
        list(source.blocks("ids"))


def test_file_that_shrinks_after_its_header_was_read(tmp_path):
    path = tmp_path / "part"
    path.write_bytes(b"12345")
    with pytest.raises(ValueError, match="expected 4 bytes at 3, got 2"):
        read_bytes(path, 3, 4)


def write_index(folder, weight_map):
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded_index(tmp_path):
    for name, array in TENSORS.items():
        (tmp_path / f"part-{name}.safetensors").write_bytes(safetensors_bytes({name: array}))
    # Not named by the index: another copy of the weights, as some repositories carry.
    (tmp_path / "consolidated.safetensors").write_bytes(b"never read")
    write_index(tmp_path, {name: f"part-{name}.safetensors" for name in TENSORS})
    source = open_safetensors(tmp_path)
    assert source.shapes == {"a": (2, 3), "b": (2,)}
    np.testing.assert_array_equal(read(source, "a"), [[0, 1, 2], [3, 4, 5]])
    assert source.file_of("b") == tmp_path / "part-b.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "gone.safetensors"}, "gone.safetensors, which is not in the folder"),
        ({"a": "../part.safetensors"}, "not a plain file name"),
        ({"a": "/etc/passwd"}, "not a plain file name"),
        ({"a": "..\\part.safetensors"}, "not a plain file name"),
        ({"a": "part.safetensors", "z": "part.safetensors"}, "1 tensors that no file has: z"),
        ({"a": "part.safetensors", "b": "copy.safetensors"}, "in both copy.safetensors and part"),
        ({}, "weight_map must be"),
        (["part.safetensors"], "weight_map must be"),
    ],
)
def test_bad_indices(tmp_path, weight_map, words):
    for name in ("part.safetensors", "copy.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes(TENSORS))
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=words):
        open_safetensors(tmp_path)


def test_one_file_of_any_name(tmp_path):
    (tmp_path / "weights-only.safetensors").write_bytes(safetensors_bytes(TENSORS))
    assert set(open_safetensors(tmp_path).shapes) == {"a", "b"}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "has no weights: expected"),
        (["pytorch_model.bin"], "pytorch_model.bin is a pickle and is never loaded"),
        (["model-q4.gguf"], "to load model-q4.gguf, give the path of that file"),
        (["x.safetensors", "y.safetensors"], "2 .* not clear which belong together"),
    ],
)
def test_folders_without_clear_weights(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=words):
        open_safetensors(tmp_path)
