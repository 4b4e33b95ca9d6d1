"""The vocabulary in a GGUF file's metadata, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inertiakv_jax.weights.gguf_file import GgufFile


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokens of a GGUF file.

    Attributes:
        path: the file, for messages.
        metadata: all of the file's.
        tokens: by id.
        types: ``gguf.constants.TokenType`` of each.
        ids: by token.
    """

    path: Path
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: Mapping[str, int]

    def listed(self, name: str, kind: type) -> list[Any]:
        """The list ``tokenizer.ggml.<name>``; ValueError unless it holds ``kind`` only."""
        return _listed(self.path, self.metadata, name, kind)

    def token_at(self, name: str) -> str | None:
        """The token that ``tokenizer.ggml.<name>_token_id`` names, None where it names none.

        Raises:
            ValueError: it is not the id of a token.
        """
        index = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise ValueError(
                f"{self.path}: tokenizer.ggml.{name}_token_id {index!r} is not one of "
                f"{len(self.tokens)} tokens"
            )
        return self.tokens[index]


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """The tokens of a file.

    Raises:
        ValueError: a list is missing, of the wrong type or length, or a token comes twice.
    """
    tokens = _listed(file.path, file.metadata, "tokens", str)
    types = _listed(file.path, file.metadata, "token_type", int)
    if len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} "
            "tokens"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens has duplicates")
    return GgufVocabulary(file.path, file.metadata, tokens, types, ids)


def _listed(path: Path, metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{path}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return values
