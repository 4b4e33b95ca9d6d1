"""RULER's variable tracking, common words and frequent words (vt, cwe, fwe)."""

import itertools
import math
import random
import string
from collections.abc import Iterator

import numpy as np

from inertiakv_jax.eval.tasks import ruler_text
from inertiakv_jax.eval.tasks.ruler_text import Sample
from inertiakv_jax.eval.tasks.task import Request

VT_NEW_TOKENS, CWE_NEW_TOKENS, FWE_NEW_TOKENS = 30, 120, 50

VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
    "above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: ",
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. "
    "Please ignore the dots '....'. What are the three most frequently appeared words in the "
    "above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
HOPS = 4
EXAMPLE_LENGTH, EXAMPLE_VALUE = 500, "12345"
COMMON = 10
ALPHA, CODE_LETTERS = 2.0, 6


class _Chains:
    """Draws chains of assignments, in lines of noise."""

    def __init__(self, seed: int):
        self.rng = ruler_text.generator(seed)
        self.values = np.random.RandomState(seed)  # the stream of numpy.random.seed

    def letters(self, count: int) -> str:
        return "".join(self.rng.choices(string.ascii_uppercase, k=count))

    def value(self) -> str:
        return str(self.values.randint(10000, 99999))

    def sample(self, lines: int, letters: int, value: str | None = None) -> Sample:
        """A chain of HOPS + 1 variables between ``lines`` lines; the value is drawn if None."""
        names = [self.letters(letters) for _ in range(HOPS + 1)]
        while len(set(names)) <= HOPS:
            names.append(self.letters(letters))
        names = list(dict.fromkeys(names))
        value = self.value() if value is None else value
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
        text = [ruler_text.NOISE] * lines
        places = sorted(self.rng.sample(range(lines), len(chain)))
        for offset, (place, line) in enumerate(zip(places, chain, strict=True)):
            text.insert(place + offset, line)
        prompt, prefix = VT
        return Sample(
            prompt.format(context="\n".join(text), value=value),
            prefix.format(count=HOPS + 1, value=value),
            tuple(names),
        )


def variable_tracking(request: Request, length: int) -> Iterator[Sample]:
    """Draw vt samples without end: which variables are assigned a value, after one example.

    Raises:
      ValueError: the length has no room for the example and a chain.
    """
    draw = _Chains(request.seed)
    count, room = request.count_tokens, length - request.template_tokens
    shown, names = _shown_example(draw, request)
    step = 5 if length < 4096 else 10
    size = ruler_text.largest_size(
        lambda lines: draw.sample(lines, 5),
        count,
        room - VT_NEW_TOKENS - count(shown),
        step=step,
        upper=lambda per_line: int(room / per_line * 3),
    )

    def make(lines: int) -> Sample:
        sample = draw.sample(lines, 5)
        example = shown
        for name in names:
            example = example.replace(name, draw.letters(len(name)))
        example = example.replace(EXAMPLE_VALUE, draw.value())
        return Sample(f"{example}\n{sample.prompt}", sample.answer_prefix, sample.answers)

    while True:
        yield ruler_text.fitting_sample(
            make,
            lambda sample: count(sample.text) + VT_NEW_TOKENS <= room,
            size,
            step=step,
            smallest=HOPS + 1,
        )


def _shown_example(draw: _Chains, request: Request) -> tuple[str, tuple[str, ...]]:
    """A short problem with its answer, and the variables in it, which every sample renames."""
    count, room = request.count_tokens, EXAMPLE_LENGTH - request.template_tokens

    def make(lines: int) -> Sample:
        return draw.sample(lines, 3, EXAMPLE_VALUE)

    size = ruler_text.largest_size(
        make, count, room, step=5, upper=lambda per_line: int(room / per_line * 3)
    )
    sample = ruler_text.fitting_sample(
        make, lambda made: count(made.text) <= room, size, step=5, smallest=HOPS + 1
    )
    return f"{sample.text} {' '.join(sample.answers)}\n", sample.answers


def common_words(request: Request, length: int) -> Iterator[Sample]:
    """Draw cwe samples without end: the ten words that a numbered list has most often.

    Above about 150,000 tokens the words run out, and samples stay at that length.

    Raises:
      ValueError: the length has no room for the ten words.
    """
    rng, seed = ruler_text.generator(request.seed), request.seed
    words = sorted({word for kind in ("noun", "adjective", "verb") for word in _words(kind)})
    random.Random(seed).shuffle(words)
    example, repeats = ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))

    def listed(num_words: int, common_times: int, times: int) -> tuple[str, list[str]]:
        drawn = rng.sample(words, num_words)
        common = drawn[:COMMON]
        rows = common * common_times + drawn[COMMON:] * times
        random.Random(seed).shuffle(rows)
        return _numbered(rows), common

    def make(num_words: int) -> Sample:
        shown, shown_answers = listed(*example)
        context, answers = listed(min(num_words, len(words)), *repeats)
        prompt, prefix = CWE
        solved = f"{prompt.format(context=shown)}{prefix} {_numbered(shown_answers)}"
        return Sample(f"{solved}\n{prompt.format(context=context)}", prefix, tuple(answers))

    count, room = request.count_tokens, length - request.template_tokens
    step = 10
    size = ruler_text.largest_size(
        make,
        count,
        room - CWE_NEW_TOKENS,
        step=step,
        probe=4096,
        upper=lambda per_word: min(int(room // per_word) * 2, len(words)),
    )
    while True:
        yield ruler_text.fitting_sample(
            make,
            lambda sample: count(sample.text) + CWE_NEW_TOKENS <= room,
            size,
            step=step,
            smallest=COMMON,
        )


def _words(kind: str) -> tuple[str, ...]:
    return ruler_text.word_list(kind)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(request: Request, length: int) -> Iterator[Sample]:
    """Draw fwe samples without end: the three most frequent of coded words, Zipf distributed.

    Raises:
      ValueError: the length has no room for three words.
    """
    draw = _Codes(request.seed)
    room = length - request.template_tokens - FWE_NEW_TOKENS
    step, vocabulary = room // 32, room // 50
    count = request.count_tokens
    if vocabulary < 4:
        raise ValueError(f"fwe needs at least {250 + request.template_tokens} tokens, got {length}")
    codes = draw.codes(vocabulary)
    size = room // CODE_LETTERS
    while count(draw.sample(codes, size).text) < room:
        size += step
    size -= step
    while True:
        codes, words = draw.codes(vocabulary), size
        while count((sample := draw.sample(codes, words)).text) > room:
            words -= step
        yield sample


class _Codes:
    """Draws random words and texts of them."""

    def __init__(self, seed: int):
        self._seed = seed
        self._rng = ruler_text.generator(seed)

    def codes(self, count: int) -> list[str]:
        """``count`` words, the most frequent first; that one is dots, and no answer."""

        def code() -> str:
            return "".join(self._rng.choices(string.ascii_lowercase, k=CODE_LETTERS))

        drawn = [code() for _ in range(count)]
        while len(set(drawn)) < count:
            drawn.append(code())
        found = sorted(set(drawn))
        random.Random(self._seed).shuffle(found)
        found[0] = "..."
        return found

    def sample(self, codes: list[str], num_words: int) -> Sample:
        """About ``num_words`` words: the k-th word comes num_words / (k^2 zeta(2)) times."""
        ranks = np.arange(1, len(codes) + 1)
        times = (num_words * ranks**-ALPHA / (math.pi**2 / 6)).astype(int)
        words = [code for code, count in zip(codes, times, strict=True) for _ in range(count)]
        random.Random(self._seed).shuffle(words)
        prompt, prefix = FWE
        return Sample(prompt.format(context=" ".join(words)), prefix, tuple(codes[1:4]))
