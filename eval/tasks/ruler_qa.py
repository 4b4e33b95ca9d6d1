"""RULER's questions among documents: qa_1 from SQuAD, qa_2 from HotpotQA (``qa.py``)."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from inertiakv_jax.eval.sources import Sources
from inertiakv_jax.eval.tasks import ruler_text
from inertiakv_jax.eval.tasks.ruler_text import Sample
from inertiakv_jax.eval.tasks.task import Request

NEW_TOKENS = 32
STEP = 10
_TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
QA = (
    f"{_TASK}\n\nThe following are given documents.\n\n{{context}}\n\n{_TASK}\n\n"
    "Question: {query}",
    " Answer:",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with the documents, by number, that belong to it.

    Attributes:
      query: its text.
      answers: right ones.
      own: documents given with it, in file order.
      holding: those of them that hold the answer.
      near: further documents of the same article.
    """

    query: str
    answers: tuple[str, ...]
    own: list[int]
    holding: list[int]
    near: list[int]


def samples(dataset: str, request: Request, length: int) -> Iterator[Sample]:
    """Ask the data set's questions in order, as long as there are any.

    Where a length has no room for the ten documents that RULER gives at least, there are fewer
    here, but always those that hold the answer; RULER's own script would not end.

    Raises:
      ValueError: no room for the documents that hold the answer.
    """
    questions, documents = READERS[dataset](request.sources)
    draw = _Draw(questions, documents, request.seed)
    room = length - request.template_tokens
    count = request.count_tokens
    size = ruler_text.largest_size(
        lambda size: draw(0, size),
        count,
        room - NEW_TOKENS,
        step=STEP,
        upper=lambda per_document: int(room / per_document * 3),
    )
    for index in range(len(questions)):
        try:
            yield ruler_text.fitting_sample(
                lambda size, index=index: draw(index, size),
                lambda sample: count(sample.text) + NEW_TOKENS <= room,
                size,
                step=STEP,
                smallest=1,
            )
        except ValueError as error:
            raise ValueError(f"question {index} and its documents: {error}") from error


class _Draw:
    """Puts a question among documents."""

    def __init__(self, questions: list[Question], documents: list[str], seed: int):
        self._questions = questions
        self._documents = documents
        self._seed = seed
        self._rng = ruler_text.generator(seed)

    def __call__(self, index: int, size: int) -> Sample:
        question = self._questions[index]
        chosen = self._chosen(question, max(size, len(question.holding)))
        random.Random(self._seed).shuffle(chosen)
        context = "\n\n".join(
            f"Document {number}:\n{document}" for number, document in enumerate(chosen, 1)
        )
        prompt, prefix = QA
        return Sample(
            prompt.format(context=context, query=question.query), prefix, question.answers
        )

    def _chosen(self, question: Question, size: int) -> list[str]:
        documents, own, near = self._documents, question.own, question.near
        if size >= len(documents):
            return (documents * -(-size // len(documents)))[:size]
        spare = size - len(own)
        if spare < 0:
            others = [number for number in own if number not in question.holding]
            numbers = question.holding + others[: size - len(question.holding)]
        elif spare > len(near):
            taken = {*own, *near}
            far = [number for number in range(len(documents)) if number not in taken]
            numbers = own + near + self._rng.sample(far, spare - len(near))
        else:
            numbers = own + self._rng.sample(near, spare)
        return [documents[number] for number in numbers]


def read_squad(sources: Sources) -> tuple[list[Question], list[str]]:
    """Answerable questions in order, and all paragraphs, sorted."""
    articles = _field(sources.squad(), "data", "ruler/squad.json")
    documents, number = _numbered(
        {paragraph["context"] for article in articles for paragraph in article["paragraphs"]}
    )
    questions = []
    for article in articles:
        near = [number[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            questions += [
                Question(
                    query=asked["question"],
                    answers=tuple(answer["text"] for answer in asked["answers"]),
                    own=[own],
                    holding=[own],
                    near=[other for other in near if other != own],
                )
                for asked in paragraph["qas"]
                if not asked.get("is_impossible", False)
            ]
    return questions, documents


def read_hotpotqa(sources: Sources) -> tuple[list[Question], list[str]]:
    """All questions in order, and all paragraphs, sorted."""
    rows = sources.hotpotqa()
    if not isinstance(rows, list):
        raise ValueError("ruler/hotpotqa.json must be a list of questions")
    documents, number = _numbered(
        {_paragraph(title, text) for row in rows for title, text in row["context"]}
    )
    questions = []
    for row in rows:
        own = {title: number[_paragraph(title, text)] for title, text in row["context"]}
        facts = {title for title, _ in row.get("supporting_facts", ())}
        questions.append(
            Question(
                query=row["question"],
                answers=(row["answer"],),
                own=list(own.values()),
                holding=[own[title] for title in own if title in facts or not facts],
                near=[],
            )
        )
    return questions, documents


def _paragraph(title: str, parts: list[str]) -> str:
    return f"{title}\n{''.join(parts)}"


def _numbered(texts: set[str]) -> tuple[list[str], dict[str, int]]:
    documents = sorted(texts)
    return documents, {text: place for place, text in enumerate(documents)}


def _field(content: Any, name: str, file: str) -> list:
    if not isinstance(content, dict) or not isinstance(content.get(name), list):
        raise ValueError(f"{file} must be an object with a list {name!r}")
    return content[name]


READERS = {"squad": read_squad, "hotpotqa": read_hotpotqa}
