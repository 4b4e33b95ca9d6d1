"""SentencePiece BPE as GGUF files describe it: pieces with scores, and no merges.

SentencePiece joins the neighbours whose joint piece has the highest score; the tokenizers package
wants the pairs in the order in which to join them. transformers orders them by other fields, and
so splits some words differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf.constants import TokenType

from inertiakv_jax.weights.gguf_vocabulary import GgufVocabulary

if TYPE_CHECKING:  # a slow import, and needed only once a tokenizer is built
    import tokenizers

SPACE = "\u2581"  # stands for a space in pieces
MAX_PIECE = 256  # characters; every way to cut a piece in two is tried


def sentencepiece_bpe(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """Build the tokenizer of a file with ``tokenizer.ggml.model`` "llama".

    Characters that are no piece become the tokens of their bytes.

    Raises:
        ValueError: scores are missing, or the unknown token is.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = vocabulary.token_at("unknown")
    if unknown is None:
        raise ValueError(f"{vocabulary.path}: tokenizer.ggml.unknown_token_id is missing")
    backend = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary.ids),
            merges=merges_by_score(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    spaces = decoders.Replace(SPACE, " ")
    # As in llama.cpp: by default, and also behind a special token.
    if vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), backend.normalizer])
        spaces = decoders.Metaspace(SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return backend


def merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a third, the third's score descending.

    Of the pairs of one piece the longest left part comes first: of two places to join,
    SentencePiece takes the left one. Pieces that are matched as a whole in the text (special and
    user-defined ones), byte tokens and unused ones are neither parts nor results.
    """
    scores = vocabulary.listed("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ValueError(
            f"{vocabulary.path}: tokenizer.ggml.scores has {len(scores)} entries for "
            f"{len(vocabulary.tokens)} tokens"
        )
    pieces = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if kind == TokenType.NORMAL
    }
    return [
        (piece[:at], piece[at:])
        for piece in sorted(pieces, key=pieces.__getitem__, reverse=True)
        for at in range(min(len(piece), MAX_PIECE) - 1, 0, -1)
        if piece[:at] in pieces and piece[at:] in pieces
    ]
