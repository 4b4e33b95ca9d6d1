"""What RULER's prompts are made of: word lists, essays, sentences, and sizes that fit a length.

The generators draw from ``random`` in the order in which RULER's own scripts do, so that one seed
gives their samples word for word: tests/evaluation/test_ruler.py compares them.
Source: NVIDIA/RULER ``scripts/data/synthetic``, Hsieh et al. 2024, arXiv 2404.06654.
"""

import dataclasses
import functools
import importlib.util
import random
import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt of RULER: the question, what the answer begins with, and the answers."""

    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]

    @property
    def text(self) -> str:
        """All that the model reads."""
        return self.prompt + self.answer_prefix


@functools.cache
def word_list(name: str) -> tuple[str, ...]:
    """One of wonderwords' lists: "noun", "adjective" or "verb", in its order."""
    # Its files, not its code: importing it warns, and leaves files open.
    package = importlib.util.find_spec("wonderwords")
    if package is None or not package.submodule_search_locations:
        raise ValueError("RULER needs the package wonderwords: pip install 'inertiakv-jax[eval]'")
    folder = Path(package.submodule_search_locations[0]) / "assets"
    text = (folder / f"{name}list.txt").read_text("utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


class WordPairs:
    """RULER's keys: all "adjective-noun", sorted, without the list of six million of them.

    Adjectives keep their order when a noun is put behind, but for one that begins with another
    and a hyphen ("blue", "blue-eyed"): the pairs of such are sorted together.
    """

    def __init__(self, adjectives: tuple[str, ...], nouns: tuple[str, ...]):
        self._nouns = sorted(set(nouns))
        self._clusters: list[list[str]] = []
        for adjective in sorted({f"{adjective}-" for adjective in adjectives}):
            if self._clusters and adjective.startswith(self._clusters[-1][0]):
                self._clusters[-1].append(adjective)
            else:
                self._clusters.append([adjective])
        self._ends = list(accumulate(map(self._size, self._clusters)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        place = bisect_right(self._ends, index)
        index -= self._ends[place - 1] if place else 0
        cluster = self._clusters[place]
        return cluster[0] + self._nouns[index] if len(cluster) == 1 else self._pairs(cluster)[index]

    def _size(self, cluster: list[str]) -> int:
        return len(self._nouns) if len(cluster) == 1 else len(self._pairs(cluster))

    def _pairs(self, cluster: list[str]) -> list[str]:
        return sorted({adjective + noun for adjective in cluster for noun in self._nouns})


@functools.cache
def word_pairs() -> WordPairs:
    """RULER's keys."""
    return WordPairs(word_list("adjective"), word_list("noun"))


@functools.lru_cache(maxsize=2)
def essay_words(essays: str) -> tuple[str, ...]:
    """The essays as words between single spaces."""
    return tuple(re.sub(r"\s+", " ", essays).split(" "))


# A full stop, question or exclamation mark before blanks or one of these ends a sentence; closing
# quotes and brackets that blanks follow still belong to it.
_END = re.compile(r"[.?!](?=\s|[?!)\";}\]*:@'({\[])(?:[\"')\]}]+(?=\s|--|$))?")
_ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "e.g", "i.e", "u.s"),
    *("inc", "ltd", "co", "corp", "vol", "fig", "cf", "p.m", "a.m"),
}


def sentences(text: str) -> list[str]:
    """Split a text into sentences, much as NLTK's Punkt does, which RULER uses.

    Punkt knows more abbreviations, but its data must be downloaded.

    >>> sentences("Who is it? It is Mr. Smith, i.e. him. (Yes.) and no.")
    ['Who is it?', 'It is Mr. Smith, i.e. him.', '(Yes.)', 'and no.']
    """
    found, start = [], 0
    for end in _END.finditer(text):
        word = text[start : end.start()].rsplit(None, 1)[-1:]
        if end[0][0] == "." and word and word[0].lstrip("\"'([").lower() in _ABBREVIATIONS:
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def largest_size(
    make: Callable[[int], Sample],
    count: Callable[[str], int],
    room: int,
    *,
    step: int,
    upper: Callable[[float], int],
    probe: int | None = None,
) -> int:
    """The largest size whose sample has at most ``room`` tokens, by bisection; ``step`` if none.

    Args:
      make: draws a sample of a size.
      count: tokens of a text.
      room: tokens that a sample may have.
      step: the smallest size looked at.
      upper: tokens per unit of size to the largest size looked at.
      probe: size of the sample that tells tokens per unit; ``step`` if None.
    """
    probe = step if probe is None else probe
    per_unit = count(make(probe).text) / probe
    low, high, found = step, max(upper(per_unit), 2 * step), None
    while low <= high:
        middle = (low + high) // 2
        if count(make(middle).text) <= room:
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return step if found is None else found


def fitting_sample(
    make: Callable[[int], Sample],
    fits: Callable[[Sample], bool],
    size: int,
    *,
    step: int,
    smallest: int,
) -> Sample:
    """Draw samples of ever smaller sizes until one fits.

    Sizes go down by ``step`` until they are no more than that, as RULER's do; RULER then draws
    that size forever, while here they go on down by one.

    Raises:
      ValueError: none fits.
    """
    while size >= smallest:
        sample = make(size)
        if fits(sample):
            return sample
        size -= step if size > step else 1
    raise ValueError(
        "not even the smallest sample fits: make it longer (eval's --lengths, knobs' --tokens); "
        "all tasks fit 1,024 tokens"
    )


def generator(seed: int) -> random.Random:
    """The stream that ``random.seed(seed)`` starts."""
    return random.Random(seed)
