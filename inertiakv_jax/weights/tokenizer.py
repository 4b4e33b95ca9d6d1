"""Tokenizers of Hugging Face folders and of GGUF files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from gguf.constants import TokenType

from inertiakv_jax.weights.byte_level import (
    PRE_TOKENIZERS,
    byte_level_bpe,
    pre_tokenizer_of,
    splitter,
)
from inertiakv_jax.weights.gguf_file import GgufFile
from inertiakv_jax.weights.gguf_vocabulary import GgufVocabulary, read_vocabulary
from inertiakv_jax.weights.sentencepiece_bpe import sentencepiece_bpe

if TYPE_CHECKING:  # slow imports, and needed only once a tokenizer is built
    import tokenizers
    import transformers

TEKKEN_MIN_TOKENS = 100_000  # Mistral's other vocabularies have at most 32,768
TOKENIZER_LOGGER = "transformers.tokenization_utils_tokenizers"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# Control tokens that end a text or a turn wherever they appear, whatever the metadata names as eos
# (the part of llama.cpp's list that the supported architectures use).
END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<end_of_turn>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "</s>",
    }
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
        backend.pre_tokenizer = splitter(PRE_TOKENIZERS["tekken"])


def gguf_tokenizer(file: GgufFile) -> transformers.PreTrainedTokenizerFast:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ValueError: a field is missing, or names a kind of tokenizer that is not implemented.
    """
    transformers = _import_transformers()
    vocabulary = read_vocabulary(file)
    backend = _backend(vocabulary)
    named = {
        f"{name}_token": vocabulary.token_at(key)
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )
    tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
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


def _backend(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    from tokenizers import processors

    metadata = vocabulary.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = byte_level_bpe(vocabulary), pre_tokenizer_of(vocabulary).add_bos
    elif kind == "llama":
        backend, add_bos = sentencepiece_bpe(vocabulary), True
    else:
        raise ValueError(
            f"{vocabulary.path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2 "
            "(byte-level BPE), llama (SentencePiece BPE). Load the model's folder or hub id instead"
        )
    _add_tokens(backend, vocabulary)
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        bos = vocabulary.token_at("bos")
        if bos is None:
            raise ValueError(
                f"{vocabulary.path}: tokenizer.ggml.add_bos_token without a bos_token_id"
            )
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, vocabulary.ids[bos])],
        )
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Mark the tokens that are matched in the raw text, before normalising and splitting."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
