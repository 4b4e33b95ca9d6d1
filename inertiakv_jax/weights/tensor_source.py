"""What a weight file must offer, so that loading never holds more than a block of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

# Numbers per block: few enough for a block and what dequantising makes of it to stay in cache.
BLOCK_NUMBERS = 1 << 16

Block = tuple[slice | np.ndarray, np.ndarray]


class TensorSource(Protocol):
    """A checkpoint under Hugging Face tensor names, read block by block.

    Sizes have been checked against the files before a source exists: ``blocks`` of any name in
    ``shapes`` lies within its file.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name, linear weights [out, in]."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        ...

    def blocks(self, name: str) -> Iterator[Block]:
        """Yield ``(rows, values)``: ``values`` (float) belong at ``tensor[rows]``.

        Every row comes exactly once; a 1-D tensor has rows of one number.
        """
        ...


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Split the rows of a tensor into ranges of about ``BLOCK_NUMBERS`` numbers."""
    row_numbers = int(np.prod(shape[1:], dtype=np.int64))
    # Multiples of 16 rows: a transposed write then fills whole cache lines.
    step = max(16, BLOCK_NUMBERS // max(row_numbers, 1) // 16 * 16)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def read_bytes(path: Path, offset: int, num_bytes: int) -> np.ndarray:
    """Read a range of a file as [num_bytes] uint8.

    Raises:
        ValueError: the file ends before the range does.
    """
    buffer = np.empty(num_bytes, np.uint8)
    with open(path, "rb") as file:
        file.seek(offset)
        got = file.readinto(buffer.data)
    if got != num_bytes:
        raise ValueError(
            f"{path}: expected {num_bytes} bytes at {offset}, got {got}: the file is truncated"
        )
    return buffer


def file_size(path: Path) -> int:
    """Size of a file in bytes."""
    return os.stat(path).st_size
