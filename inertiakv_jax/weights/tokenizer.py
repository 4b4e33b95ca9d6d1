"""Tokenizers of Hugging Face folders and of GGUF files.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``) and does not store it. transformers
ignores the name; here it picks a row of ``PRE_TOKENIZERS``, and an unknown one is an error, for a
wrong split gives plausible, wrong ids.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gguf.constants import TokenType

from inertiakv_jax.weights.gguf_file import GgufFile

if TYPE_CHECKING:  # slow imports, and needed only once a tokenizer is built
    import tokenizers
    import transformers

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
TEKKEN_MIN_TOKENS = 100_000  # Mistral's other vocabularies have at most 32,768


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

TOKENIZER_LOGGER = "transformers.tokenization_utils_tokenizers"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# Control tokens that end a text or a turn wherever they appear, whatever the metadata names as eos
# (the part of llama.cpp's list that the supported architectures use).
END_TOKENS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "</s>"}
)


def hf_tokenizer(folder: Path, family: str) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder; code in the folder is never run.

    With a ``tokenizer.json`` exactly that is loaded: transformers 5's own classes (GPT2Tokenizer,
    which SmolLM2 names) would rebuild its pre-tokenizer and lose what they do not know. One thing
    is put right: many Mistral models were published with another split than they were trained on.

    Args:
        folder: with tokenizer.json, or with the vocabulary files that it is made from.
        family: ``ModelConfig.family``.

    Raises:
        ValueError: the folder has no tokenizer, or one that transformers cannot load.
    """
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        # transformers 5 would make an empty tokenizer.
        raise ValueError(
            f"{folder} has no tokenizer: expected one of {', '.join(VOCABULARY_FILES)}"
        )
    transformers = _import_transformers()
    has_json = (folder / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if has_json else transformers.AutoTokenizer
    try:
        # The remark is on Mistral's split, which transformers cannot tell for sure; see below.
        with _without_remark(TOKENIZER_LOGGER, "incorrect regex pattern"):
            tokenizer = loader.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises many types for a missing or broken file
        raise ValueError(f"{folder}: cannot load its tokenizer: {error}") from error
    if has_json and family == "mistral":
        _use_tekken_split(tokenizer.backend_tokenizer)
    return tokenizer


def _use_tekken_split(backend: tokenizers.Tokenizer) -> None:
    """Give a byte-level Mistral tokenizer the split of Mistral's own tekken.json."""
    from tokenizers import pre_tokenizers

    if backend.get_vocab_size() >= TEKKEN_MIN_TOKENS and isinstance(
        backend.pre_tokenizer, pre_tokenizers.Sequence
    ):
        backend.pre_tokenizer = _splitter(PRE_TOKENIZERS["tekken"])


def gguf_tokenizer(file: GgufFile) -> transformers.PreTrainedTokenizerFast:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ValueError: a field is missing, or names a kind of tokenizer that is not implemented.
    """
    transformers = _import_transformers()
    metadata = file.metadata
    backend = _backend(file)
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        f"{name}_token": _token_at(file, tokens, key)
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _import_transformers() -> ModuleType:
    # None is needed.
    with _without_remark("transformers", "PyTorch was not found"):
        import transformers

        return transformers


@contextlib.contextmanager
def _without_remark(logger_name: str, words: str) -> Iterator[None]:
    """Keep log messages with these words from being shown."""

    def is_another(record: logging.LogRecord) -> bool:
        return words not in record.getMessage()

    logger = logging.getLogger(logger_name)
    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids of the control tokens of a GGUF file that end a text or a turn."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    return tuple(
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == TokenType.CONTROL and token in END_TOKENS
    )


def _backend(file: GgufFile) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    row = _pre_tokenizer_row(file)
    tokens = _list(file, "tokens", str)
    types = _list(file, "token_type", int)
    merges = _list(file, "merges", str)
    if len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} "
            "tokens"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens has duplicates")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[_pair(file, merge, vocabulary) for merge in merges],
            ignore_merges=row.whole_words,
        )
    )
    if row.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _splitter(row)
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, types)
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token", row.add_bos)
    if add_bos:
        bos = _token_at(file, tokens, "bos")
        if bos is None:
            raise ValueError(f"{file.path}: tokenizer.ggml.add_bos_token without a bos_token_id")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, vocabulary[bos])],
        )
    return backend


def _pre_tokenizer_row(file: GgufFile) -> PreTokenizer:
    model = file.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2 "
            "(byte-level BPE). Load the model's folder or hub id instead"
        )
    name = str(file.metadata.get("tokenizer.ggml.pre", "(none given)"))
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _splitter(row: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        for pattern in row.splits
    ]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Mark the tokens that are matched in the raw text, before normalising and splitting."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _pair(file: GgufFile, merge: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.merges has {merge!r}, which joins no two tokens to a "
            "third"
        )
    return left, right


def _list(file: GgufFile, name: str, kind: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{file.path}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return values


def _token_at(file: GgufFile, tokens: list[str], key: str) -> str | None:
    index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{key}_token_id {index!r} is not one of {len(tokens)} "
            "tokens"
        )
    return tokens[index]
