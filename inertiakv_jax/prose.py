"""Running text of any length, made from a seed, and a number hidden in it to ask for."""

import dataclasses
import random
from collections.abc import Callable, Iterator

PEOPLE = (
    ("Marta", "baker", "she"),
    ("Oskar", "ferryman", "he"),
    ("Ines", "schoolteacher", "she"),
    ("Tomas", "harbour master", "he"),
    ("Wilma", "watchmaker", "she"),
    ("Joren", "carpenter", "he"),
    ("Adela", "librarian", "she"),
    ("Pavel", "postman", "he"),
    ("Hanne", "beekeeper", "she"),
    ("Rufus", "cook", "he"),
    ("Lena", "weaver", "she"),
    ("Emil", "gardener", "he"),
)
PLACES = (
    "the old customs house",
    "the footbridge by the mill",
    "the long jetty",
    "the market square",
    "the orchard wall",
    "the chapel steps",
    "the boatyard",
    "the reading room",
    "the lower lane",
    "the station platform",
    "the salt sheds",
    "the hill road",
    "the pump house",
    "the inn by the locks",
)
THINGS = (
    "a crate of lamp oil",
    "a coil of rope",
    "a box of candle ends",
    "the wrong set of keys",
    "a jar of plum jam",
    "a letter without a stamp",
    "a bolt of grey cloth",
    "a clock that ran backwards",
    "a basket of wet laundry",
    "the last of the winter apples",
    "an umbrella that belonged to nobody",
    "a sack of seed potatoes",
    "a borrowed ladder",
    "an unfinished map of the bay",
)
WEATHER = (
    "a thin rain came in from the sea",
    "the fog lay so low that the masts seemed to float",
    "the wind turned and brought the smell of tar",
    "the sun stood pale behind the chimneys",
    "frost had whitened the railings",
    "the gulls were louder than the bells",
    "the river ran high and brown",
    "snow began to fall on the roofs",
    "the air was so still that voices carried over the water",
)
SUBJECTS = (
    "the price of coal",
    "the new schedule of the ferry",
    "a wedding that had been put off twice",
    "the leak in the chapel roof",
    "who would play the organ in spring",
    "the fish that no longer came",
    "an uncle who had gone to sea",
    "whether the bridge would hold",
    "the harvest beyond the hill",
    "a lamp that burned all night in an empty house",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

OPENINGS = (
    "On {day} {name} the {job} walked down to {place} with {thing}.",
    "It was early on {day} when {name} the {job} reached {place}, and {weather}.",
    "It was {day} again, and {name}, the town's only {job}, had not slept well.",
    "Nobody expected {name} the {job} to be the first at {place} that {day}.",
    "Late on {day} {weather}, and {name} the {job} stayed at {place} longer than usual.",
    "All through {day} {name} the {job} had been looking for {thing}.",
)
MIDDLES = (
    "{She} had promised to bring {thing} to {other}, but the road was closed and it had to wait.",
    "{other} was already there, leaning on a barrow and talking to nobody about {subject}.",
    "They spoke for a while about {subject}, and neither said what both were thinking.",
    "By noon {weather}, and the work went slowly.",
    '"There is always {thing} left over," said {other}, "and never anyone who remembers why."',
    "{She} wrote it down in a green notebook, as {she} did with all that could be forgotten.",
    "From {place} one could see the whole bay, and {she} liked to stop there in spite of the hour.",
    "The children had drawn {place} in chalk, with an arrow to where they thought a treasure lay.",
    "Years ago {place} had burned down, and people still gave directions by what it used to be.",
    "Somebody had left {thing} on a bench, and by the afternoon a small crowd stood around it.",
    "{other} laughed at that, though {subject} was no laughing matter in those years.",
    "Later {weather}, and everyone agreed that it had been the same the year before.",
    "{She} thought of {subject} and took the longer way, past {place}.",
    '"Ask {other}," people said when it came to {subject}, and then they asked someone else.',
    "There was a light at {place}, and {she} heard somebody sawing in the dark.",
    "Behind {place} the grass had grown so tall that {thing} could lie in it for weeks unseen.",
    "{She} traded {thing} for a cup of coffee and thought it a good bargain.",
    "The others had gone ahead to {place}, where {weather}.",
    "What worried {other} more than {subject} was that nobody else seemed worried.",
    "An old dog slept across the way to {place} and moved for no one, not even for {other}.",
)
CLOSINGS = (
    "In the evening {she} went home by {place}, and nobody asked about {thing}.",
    "So the day ended much as it had begun, and {weather}.",
    "It was dark when {she} remembered {thing}, still standing at {place}.",
    "After that nothing was said of {subject} until the following week.",
    "{other} waved from {place}, and that was all the thanks there would be.",
)
TOPICS = ("thimble", "compass", "walnut", "violet", "saddle", "trumpet", "marble", "pepper")
"""Words that a number may belong to; none is used elsewhere in the text."""

SENTENCES_A_PARAGRAPH = (5, 8)
TRIES = 10  # for a sentence that has not been there yet


@dataclasses.dataclass(frozen=True)
class PlantedText:
    """A text with one number in it.

    Attributes:
      text: paragraphs of prose, one sentence of which is ``needle``.
      topic: the word that the number belongs to.
      number: its seven digits; no other digit is in the text.
    """

    text: str
    topic: str
    number: str

    @property
    def needle(self) -> str:
        """The sentence that gives the number."""
        return f"One of the special magic numbers for {self.topic} is: {self.number}."

    @property
    def request(self) -> str:
        """The text with a question behind it, as a user would send it."""
        return (
            "A special magic number is hidden in the following text. Remember it: you will be "
            f"asked for it afterwards.\n\n{self.text}\n\nWhat is the special magic number for "
            f"{self.topic} mentioned in the provided text?"
        )

    @property
    def answer_prefix(self) -> str:
        """How the answer begins."""
        return f"The special magic number for {self.topic} mentioned in the provided text is"


def planted_text(num_tokens: int, seed: int, count_tokens: Callable[[str], int]) -> PlantedText:
    """Write about ``num_tokens`` tokens of prose and plant a number between two sentences.

    Args:
      num_tokens: length to reach, at least 1; the last sentence is finished.
      seed: the same seed and length give the same text.
      count_tokens: tokens of a text, by the model's tokenizer.

    Raises:
      ValueError: ``num_tokens`` below 1.
    """
    if num_tokens < 1:
        raise ValueError(f"the text must have at least 1 token, got {num_tokens}")
    rng = random.Random(seed)
    planted = PlantedText("", rng.choice(TOPICS), str(rng.randrange(1_000_000, 10_000_000)))
    pieces, length = [], count_tokens(planted.needle)
    for sentence in sentences(rng):
        pieces.append(sentence)
        length += count_tokens(sentence)
        if length >= num_tokens:
            break
    # Neither first nor last words: those are easy to find, and would be kept by any rule of age.
    place = round(len(pieces) * rng.uniform(0.2, 0.8))
    pieces.insert(place, " " + planted.needle)
    return dataclasses.replace(planted, text="".join(pieces).strip())


def sentences(rng: random.Random) -> Iterator[str]:
    """Yield sentences without end, each with the space or blank line before it."""
    seen = set()
    while True:
        person = rng.choice(PEOPLE)
        middles = rng.sample(MIDDLES, rng.randint(*SENTENCES_A_PARAGRAPH) - 2)
        templates = [rng.choice(OPENINGS), *middles, rng.choice(CLOSINGS)]
        for index, template in enumerate(templates):
            sentence = _filled(template, person, rng)
            for _ in range(TRIES):
                if sentence not in seen:
                    break
                sentence = _filled(template, person, rng)
            seen.add(sentence)
            yield ("\n\n" if index == 0 else " ") + sentence


def _filled(template: str, person: tuple[str, str, str], rng: random.Random) -> str:
    name, job, she = person
    return template.format(
        name=name,
        job=job,
        she=she,
        She=she.capitalize(),
        other=rng.choice([other for other, _, _ in PEOPLE if other != name]),
        day=rng.choice(DAYS),
        place=rng.choice(PLACES),
        thing=rng.choice(THINGS),
        weather=rng.choice(WEATHER),
        subject=rng.choice(SUBJECTS),
    )
