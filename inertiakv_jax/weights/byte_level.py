"""Byte-level BPE as GGUF files describe it: their merges, and a split that they only name.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``) and does not store it. transformers
ignores the name; here it picks a row of ``PRE_TOKENIZERS``, and an unknown one is an error, for a
wrong split gives plausible, wrong ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inertiakv_jax.weights.gguf_vocabulary import GgufVocabulary

if TYPE_CHECKING:  # a slow import, and needed only once a tokenizer is built
    import tokenizers

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CL100K_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """What one name in ``tokenizer.ggml.pre`` stands for.

    Attributes:
        splits: regular expressions applied one after the other; matches and what lies between
            them become pieces.
        nfc: text is first brought to Unicode normal form C.
        whole_words: a piece that is itself a token is not built up by merges (``ignore_merges``).
        add_bos: a text begins with the bos token unless the file says otherwise.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer((CL100K_SPLIT % "{1,3}",), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((CL100K_SPLIT % "",), nfc=True)

# As in the models' own tokenizer.json and in llama.cpp's llama-vocab.cpp. "default" is what
# llama.cpp does under that name; it is not GPT-2's rule.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer((r"\p{N}", GPT2_SPLIT)),
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": PreTokenizer((TEKKEN_SPLIT,), whole_words=True, add_bos=True),
    "gpt-2": PreTokenizer((GPT2_SPLIT,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def byte_level_bpe(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """Build the tokenizer of a file with ``tokenizer.ggml.model`` "gpt2".

    Raises:
        ValueError: merges are missing or wrong, or the pre-tokenizer is not known.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    row = pre_tokenizer_of(vocabulary)
    merges = vocabulary.listed("merges", str)
    backend = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary.ids),
            merges=[_pair(vocabulary, merge) for merge in merges],
            ignore_merges=row.whole_words,
        )
    )
    if row.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitter(row)
    backend.decoder = decoders.ByteLevel()
    return backend


def pre_tokenizer_of(vocabulary: GgufVocabulary) -> PreTokenizer:
    """The row that ``tokenizer.ggml.pre`` names; ValueError listing the known names otherwise."""
    name = str(vocabulary.metadata.get("tokenizer.ggml.pre", "(none given)"))
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"{vocabulary.path}: tokenizer.ggml.pre {name!r} is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def splitter(row: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The splits of a row, then bytes as letters."""
    from tokenizers import Regex, pre_tokenizers

    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        for pattern in row.splits
    ]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _pair(vocabulary: GgufVocabulary, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    ids = vocabulary.ids
    if left not in ids or right not in ids or left + right not in ids:
        raise ValueError(
            f"{vocabulary.path}: tokenizer.ggml.merges has {merge!r}, which joins no two tokens to "
            "a third"
        )
    return left, right
