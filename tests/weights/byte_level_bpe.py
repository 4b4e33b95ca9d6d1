"""Byte-level BPE as its papers describe it, in plain Python: what tokenizers are compared with."""

import itertools
import unicodedata

import regex
from weights.tiny_files import byte_alphabet

# Restated from the models' own tokenizer.json (SmolLM2, Qwen2.5, Llama 3), Mistral's tekken.json,
# GPT-2's code and, for "default", llama.cpp.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = (
    rf"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns applied in turn, normal form C, whole pieces looked up first.
RULES = {
    "smollm": ([r"\p{N}", GPT2], False, False),
    "qwen2": ([QWEN2], True, False),
    "llama-bpe": ([QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)], False, True),
    "tekken": ([TEKKEN], False, True),
    "gpt-2": ([GPT2], False, False),
    "default": ([r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}"], False, False),
}


def split(pieces, pattern):
    """Cut each piece into the matches of a pattern and what lies between them."""
    for piece in pieces:
        end = 0
        for match in regex.finditer(pattern, piece):
            yield from filter(None, [piece[end : match.start()], match.group()])
            end = match.end()
        yield from filter(None, [piece[end:]])


def encode(text, pre, vocabulary, merges):
    """Token ids of a text without special tokens."""
    patterns, nfc, whole_pieces = RULES[pre]
    pieces = [unicodedata.normalize("NFC", text) if nfc else text]
    for pattern in patterns:
        pieces = list(split(pieces, pattern))
    alphabet = byte_alphabet()
    ids = []
    for piece in pieces:
        symbols = [alphabet[byte] for byte in piece.encode()]
        if whole_pieces and "".join(symbols) in vocabulary:
            symbols = ["".join(symbols)]
        ids += [vocabulary[symbol] for symbol in merged(symbols, merges)]
    return ids


def merged(symbols, merges):
    """Join the neighbours of the earliest merge, leftmost first, until none is left."""
    while True:
        ranks = [merges.get(pair, len(merges)) for pair in itertools.pairwise(symbols)]
        if not ranks or min(ranks) == len(merges):
            return symbols
        at = ranks.index(min(ranks))
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
