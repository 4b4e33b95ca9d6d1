"""Text to train on: from a file or a data set of the hub, cut into texts of equal length."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from inertiakv_jax.language_model import LanguageModel

DATASET_CHARACTERS = 20_000_000
"""Rows of a data set are read up to about so many characters, some five million tokens."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token ids, cut into texts that do not overlap.

    Attributes:
      training: [n, T] int32.
      held_out: [h, T] int32, from the end; never trained on.
    """

    training: np.ndarray
    held_out: np.ndarray

    def batch(self, first: int, size: int, seed: int) -> np.ndarray:
        """[size, T], texts number ``first`` on of a shuffled stream without end.

        Every pass over the texts has its own order, drawn from ``seed`` and the pass: what comes
        next depends on nothing but the place in the stream.
        """
        passes, places = np.divmod(np.arange(first, first + size), len(self.training))
        orders = {
            number: np.random.default_rng((seed, number)).permutation(len(self.training))
            for number in np.unique(passes).tolist()
        }
        chosen = [orders[a][b] for a, b in zip(passes.tolist(), places.tolist(), strict=True)]
        return self.training[chosen]


def cut(lm: LanguageModel, text: str, length: int, held_out: int) -> Texts:
    """Encode a text and cut it up; its last tenth is held out.

    Every piece begins as a prompt does: with the first token of texts, if the tokenizer sets one.

    Args:
      lm: its tokenizer is used.
      text: at least two pieces long.
      length: T, tokens of a piece.
      held_out: pieces held out, at most.

    Raises:
      ValueError: the text is empty or too short, or has tokens outside the vocabulary.
    """
    if not text.strip():
        raise ValueError("the text to train on is empty")
    # One long text: that it is longer than the model's positions is no reason to warn.
    ids = lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin = _text_begin(lm.tokenizer)
    body = length - len(begin)
    count = len(ids) // body
    if count < 2:
        raise ValueError(
            f"the text to train on has {len(ids)} tokens, but needs at least {2 * body}: one piece "
            f"of {length} to train on, one to hold out; give a longer text or a smaller context"
        )
    if min(ids) < 0 or max(ids) >= lm.config.vocab_size:
        raise ValueError(
            f"the text has token ids {min(ids)} .. {max(ids)}, outside the vocabulary "
            f"0 .. {lm.config.vocab_size - 1}"
        )
    bodies = np.asarray(ids[: count * body], np.int32).reshape(count, body)
    pieces = np.hstack([np.tile(np.asarray(begin, np.int32), (count, 1)), bodies])
    held = max(1, min(held_out, count // 10))
    return Texts(pieces[:-held], pieces[-held:])


def _text_begin(tokenizer: Any) -> list[int]:
    """The first token of every text, or nothing."""
    first = tokenizer.bos_token_id
    return [first] if first is not None and tokenizer("a")["input_ids"][:1] == [first] else []


def read_text(path: Path) -> str:
    """A text file's content.

    Raises:
      ValueError: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the text {path} is not valid UTF-8: {error}") from error


def read_dataset(name: str, configuration: str | None, split: str, column: str) -> str:
    """Rows of a data set, from the hub or a folder, with blank lines between.

    Args:
      name: as ``datasets.load_dataset`` takes it; read row by row, no further than needed.
      configuration: its variant, if it has several.
      split: "train", say.
      column: the one with the text.

    Raises:
      ValueError: the package datasets is missing, or the data set has no such column.
      ConnectionError: the data set cannot be read.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "a data set needs the package datasets: pip install 'inertiakv-jax[eval]'"
        ) from error
    rows, characters = [], 0
    try:
        for row in load_dataset(name, configuration, split=split, streaming=True):
            if not isinstance(row.get(column), str):
                break
            rows.append(row[column])
            characters += len(rows[-1])
            if characters >= DATASET_CHARACTERS:
                return "\n\n".join(rows)
        else:
            return "\n\n".join(rows)
    except Exception as error:  # the HTTP libraries' own errors differ between versions
        raise ConnectionError(
            f"cannot read the data set {name} ({type(error).__name__}: {error})"
        ) from error
    raise ValueError(
        f"the data set {name} has no texts in a column {column!r}; its columns are "
        + ", ".join(map(str, row))
    )
