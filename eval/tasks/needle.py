"""A needle in a haystack, over a grid of lengths and depths, scored by ROUGE-L and by containment.

One sentence is hidden in essays or in noise and asked for. The first needle is the well-known one
about San Francisco; further samples of a cell hide another one in another part of the essays.
Source: G. Kamradt's test; ROUGE-L as in arXiv 2609.03515; the other needles are ours.
"""

import functools
import itertools

from inertiakv_jax.eval import metrics
from inertiakv_jax.eval.tasks import ruler_text
from inertiakv_jax.eval.tasks.ruler_text import Sample
from inertiakv_jax.eval.tasks.task import Example, Request, Scores, Task

NEW_TOKENS = 64
PROMPT = (
    "This is a very long text. Somewhere in it stands the answer to a question.\n\n{context}\n\n"
    "What is the best thing to do in {place}? Answer with the sentence that the text has on it."
)
PREFIX = " The best thing to do in {place} is"
NEEDLES = (
    ("San Francisco", "eat a sandwich and sit in Dolores Park on a sunny day"),
    ("Lisbon", "ride the yellow tram up the hill and drink coffee at the top"),
    ("Kyoto", "walk through the bamboo before the first bus of tourists arrives"),
    ("Reykjavik", "swim in the warm public pool while snow is falling"),
    ("Marrakesh", "get lost among the spice sellers until the drums begin"),
    ("Edinburgh", "climb the old volcano and listen for the one o'clock gun"),
    ("Buenos Aires", "watch old couples dance in the square on Sunday night"),
    ("Hanoi", "cross the street slowly and never take a step back"),
    ("Toronto", "take the ferry to the islands and look back at the towers"),
    ("Cape Town", "wait for the clouds to roll over the flat mountain"),
)
STEP = 20
HAYSTACKS = ("essay", "noise")


def _examples(request: Request) -> list[Example]:
    if request.haystack not in HAYSTACKS:
        raise ValueError(
            f"haystack must be one of {', '.join(HAYSTACKS)}, got {request.haystack!r}"
        )
    samples = request.samples or 1
    if samples > len(NEEDLES):
        raise ValueError(f"there are {len(NEEDLES)} needles, got samples={samples}")
    wrong = [depth for depth in request.depths if not 0 <= depth <= 100]
    if wrong:
        raise ValueError(f"depths must be in percent, 0 to 100, got {wrong}")
    found = []
    for length in request.lengths:
        made = [cell for sample in range(samples) for cell in _column(request, length, sample)]
        found += [
            Example(
                task="needle",
                index=index,
                prompt=one.prompt,
                answer_prefix=one.answer_prefix,
                references=one.answers,
                max_new_tokens=NEW_TOKENS,
                length=length,
                tags={"depth": depth},
            )
            for index, (depth, one) in enumerate(made)
        ]
    return found


def _column(request: Request, length: int, sample: int) -> list[tuple[float, Sample]]:
    """One needle at every depth of a text of ``length`` tokens."""
    place, answer = NEEDLES[sample]
    room = length - request.template_tokens - NEW_TOKENS

    def make(size: int, depth: float = 0) -> Sample:
        parts = ruler_text.sentences(_haystack(request, sample, size))
        needle = f"The best thing to do in {place} is {answer}."
        parts.insert(round(len(parts) * depth / 100), needle)
        prompt = PROMPT.format(context=" ".join(parts), place=place)
        return Sample(prompt, PREFIX.format(place=place), (f"{answer}.",))

    count = request.count_tokens
    size = ruler_text.largest_size(
        make,
        count,
        room,
        step=STEP,
        probe=max(length // 2, STEP),
        upper=lambda per_word: int(room / per_word * 2),
    )
    return [
        (
            depth,
            ruler_text.fitting_sample(
                functools.partial(make, depth=depth),
                lambda sample: count(sample.text) <= room,
                size,
                step=STEP,
                smallest=1,
            ),
        )
        for depth in request.depths
    ]


def _haystack(request: Request, sample: int, size: int) -> str:
    """``size`` words, going around; each sample begins in another part of the essays."""
    if request.haystack == "noise":
        words, start = ruler_text.NOISE.split(" "), 0
    else:
        words, start = ruler_text.essay_words(request.sources.essays()), 997 * sample
    return " ".join(itertools.islice(itertools.cycle(words), start, start + size))


def _score(example: Example, prediction: str) -> Scores:
    (reference,) = example.references
    contains = reference.rstrip(".").lower() in prediction.lower()
    return {
        "rouge_l": metrics.rouge_l(prediction, reference),
        "contains": float(contains),
    }


TASKS = [Task("needle", "needle", _examples, _score)]
GROUPS: dict[str, tuple[str, ...]] = {}
