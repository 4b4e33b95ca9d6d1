"""The header of a GGUF file, parsed with every size checked against the file.

The gguf package dequantises; its reader is not used: it maps a NumPy array per string (seconds for
a vocabulary) and answers a corrupt file with whatever error it falls over.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from inertiakv_jax.weights.tensor_source import file_size

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: shape as NumPy has it (rows first), quantisation, byte offset."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header: metadata by key, tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


@dataclass
class _Reader:
    """A position in a mapped file; every read is checked against the file's end."""

    path: Path
    data: mmap.mmap
    size: int
    position: int = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.position:
            raise ValueError(
                f"{self.path}: the header asks for {num_bytes} bytes at {self.position}, the file "
                f"has {self.size}: it is truncated or corrupt"
            )
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: a string of the header is not UTF-8") from error

    def value(self) -> Any:
        kind = self.kind()
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(kind)
        kind, count = self.kind(), self.number("<Q")
        if kind is GGUFValueType.ARRAY:
            raise ValueError(f"{self.path}: an array of arrays in the header is not supported")
        if kind is GGUFValueType.STRING:
            if count > (self.size - self.position) // 8:
                raise ValueError(
                    f"{self.path}: the header announces {count} strings, more than the file of "
                    f"{self.size} bytes can hold: it is truncated or corrupt"
                )
            return [self.text() for _ in range(count)]
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def scalar(self, kind: GGUFValueType) -> Any:
        return self.text() if kind is GGUFValueType.STRING else self.number(SCALARS[kind])

    def kind(self) -> GGUFValueType:
        number = self.number("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise ValueError(f"{self.path}: {number} is no GGUF value type: corrupt") from error


def open_gguf(path: Path) -> GgufFile:
    """Parse the header of a GGUF file.

    Raises:
        ValueError: not a GGUF file, a version or quantisation that is not supported, or a
            truncated or corrupt file; the message names the file and, where it is one, the tensor.
    """
    size = file_size(path)
    if size < 24:
        raise ValueError(f"{path}: {size} bytes are too few for a GGUF file")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data, size)
        magic = reader.take(4)
        if magic != MAGIC:
            raise ValueError(f"{path}: not a GGUF file: begins with {magic!r}, expected {MAGIC!r}")
        version = reader.number("<I")
        if version not in VERSIONS:
            raise ValueError(
                f"{path}: GGUF version {version} is not supported; supported: little-endian "
                f"{', '.join(map(str, VERSIONS))}"
            )
        num_tensors, num_keys = reader.number("<Q"), reader.number("<Q")
        metadata = _read_metadata(reader, num_keys)
        infos = _read_tensor_infos(reader, num_tensors)
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{path}: general.alignment {alignment!r} is not a power of two")
        data_start = -(-reader.position // alignment) * alignment
    tensors = _check_tensors(path, infos, data_start, alignment, size)
    return GgufFile(path, metadata, tensors)


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"{reader.path}: metadata key {key!r} appears twice")
        metadata[key] = reader.value()
    return metadata


def _read_tensor_infos(
    reader: _Reader, count: int
) -> list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]:
    infos = []
    for _ in range(count):
        name, num_dimensions = reader.text(), reader.number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(
                f"{reader.path}: tensor {name!r} has {num_dimensions} dimensions, expected 1 to "
                f"{MAX_DIMENSIONS}"
            )
        # GGUF lists the contiguous dimension first.
        shape = tuple(reader.number("<Q") for _ in range(num_dimensions))[::-1]
        number, offset = reader.number("<I"), reader.number("<Q")
        try:
            quantization = GGMLQuantizationType(number)
        except ValueError as error:
            raise ValueError(
                f"{reader.path}: tensor {name!r} has unknown quantisation type {number}"
            ) from error
        infos.append((name, shape, quantization, offset))
    return infos


def _check_tensors(
    path: Path,
    infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]],
    data_start: int,
    alignment: int,
    size: int,
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    ranges = []
    for name, shape, quantization, offset in infos:
        where = f"{path}: tensor {name!r}"
        if name in tensors:
            raise ValueError(f"{where} appears twice")
        block, _ = GGML_QUANT_SIZES[quantization]
        if min(shape) < 1 or shape[-1] % block:
            raise ValueError(
                f"{where}: shape {shape} does not fit {quantization.name}, whose rows are "
                f"multiples of {block}"
            )
        if offset % alignment:
            raise ValueError(f"{where}: offset {offset} is not a multiple of {alignment}")
        start = data_start + offset
        stop = start + quantized_bytes(shape, quantization)
        if stop > size:
            raise ValueError(
                f"{where}: ends at byte {stop}, the file has {size}: it is truncated or corrupt"
            )
        tensors[name] = GgufTensor(name, shape, quantization, start)
        ranges.append((start, stop, name))
    ranges.sort()
    for (_, stop, before), (start, _, after) in itertools.pairwise(ranges):
        if start < stop:
            raise ValueError(f"{path}: tensors {before!r} and {after!r} overlap")
    return tensors


def quantized_bytes(shape: tuple[int, ...], quantization: GGMLQuantizationType) -> int:
    """Bytes that a tensor of this shape takes in the file."""
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    return math.prod(shape) // block * block_bytes
