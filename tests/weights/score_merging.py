"""SentencePiece's BPE in plain Python: of all neighbours, join those with the best joint piece."""

import itertools

SPACE = "\u2581"


def encode(text, scores, matched, prefix):
    """Pieces of a text.

    Args:
      text: any string.
      scores: score by piece.
      matched: pieces that are taken from the text as they stand, before anything else.
      prefix: a space goes before every stretch between these.
    """
    pieces, start, at = [], 0, 0

    def stretch(part):
        return joined(" " + part if prefix and part else part, scores)

    while at < len(text):
        here = [token for token in matched if text.startswith(token, at)]
        if here:
            token = max(here, key=len)
            pieces += [*stretch(text[start:at]), token]
            start = at = at + len(token)
        else:
            at += 1
    return pieces + stretch(text[start:])


def joined(text, scores):
    symbols = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            break
        _, place = min(pairs)  # of equals the leftmost
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    pieces = []
    for symbol in symbols:
        if symbol in scores:
            pieces.append(symbol)
        else:
            pieces += [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces
