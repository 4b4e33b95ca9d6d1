"""Which knob matters: memory over steps, or weights over layers? A grid of both, measured.

The paper's one coefficient sets both (its authors' main limit). Here they are varied apart, on
questions about one fact in a long text, with everything else as in InertiaKV. Ours.
"""

import dataclasses
import io
from collections.abc import Callable, Sequence

from inertiakv_jax import demo, policies, prose
from inertiakv_jax.eval.continuation import Request, answers
from inertiakv_jax.eval.sources import Sources
from inertiakv_jax.eval.tasks.ruler_niah import TASKS, samples
from inertiakv_jax.eval.tasks.task import Request as TaskRequest
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policies import Policy
from inertiakv_jax.state import PER_HEAD, PER_LAYER, SHARED

DECAYS = (0.0, 0.5, 0.8, 0.95, 1.0)
LAYER_WEIGHTS = ("uniform", "sequential", "last")
NEW_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Cell:
    """One rule of the grid.

    Attributes:
      retention: who shares a ranking.
      layer_weights: of a shared ranking; "" where each layer or head has its own.
      decay: what a step leaves of the utilities; 1 is the cumulative rule.
    """

    retention: str
    layer_weights: str
    decay: float

    @property
    def name(self) -> str:
        """Its key in results."""
        return " ".join(filter(None, (self.retention, self.layer_weights, str(self.decay))))

    def policy(self, ratio: float) -> Policy:
        """The rule as a policy."""
        options = {"layer_weights": self.layer_weights} if self.layer_weights else {}
        return policies.inertiakv(ratio, retention=self.retention, decay=self.decay, **options)


@dataclasses.dataclass(frozen=True)
class Question:
    """Token ids of a prompt whose answer must hold ``number``."""

    tokens: list[int]
    number: str


def cells() -> list[Cell]:
    """The grid: shared rankings of all decays and weights, and one ranking per layer and head."""
    kinds = [(SHARED, weights) for weights in LAYER_WEIGHTS] + [(PER_LAYER, ""), (PER_HEAD, "")]
    return [Cell(*kind, decay) for kind in kinds for decay in DECAYS]


def planted_questions(lm: LanguageModel, texts: int, tokens: int) -> list[Question]:
    """A number planted in made-up prose, one text a seed."""

    def count(text: str) -> int:
        return len(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

    posed = [demo.pose(lm, prose.planted_text(tokens, seed, count)) for seed in range(texts)]
    return [Question(question.token_ids, question.number) for question in posed]


def multikey_questions(
    lm: LanguageModel, texts: int, tokens: int, sources: Sources
) -> list[Question]:
    """RULER's niah_multikey_1: one of four keyed numbers in essays."""

    def encode(text: str) -> list[int]:
        return list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

    request = TaskRequest(sources=sources, count_tokens=lambda text: len(encode(text)))
    found = []
    for _, sample in zip(
        range(texts), samples(TASKS["niah_multikey_1"], request, tokens), strict=False
    ):
        text = sample.prompt
        if lm.tokenizer.chat_template:
            text = lm.chat_prompt([{"role": "user", "content": text}])
        found.append(Question(encode(text + sample.answer_prefix), sample.answers[0]))
    return found


def measure(
    lm: LanguageModel,
    questions: Sequence[Question],
    ratio: float,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[bool]]:
    """Answer every question by every rule.

    Args:
      lm: the model.
      questions: of ``planted_questions`` or ``multikey_questions``.
      ratio: fraction of the prompt removed.
      on_progress: told how many answers there are, of how many.

    Returns:
      For "full" and each cell, by name, whether each answer was right.
    """
    grid = cells()
    chosen = [cell.policy(ratio) for cell in grid] + [policies.full()]
    names = [cell.name for cell in grid] + ["full"]
    right: dict[str, list[bool]] = {key: [] for key in names}
    request = Request(max_new_tokens=NEW_TOKENS, stop_tokens=tuple(lm.eos_token_ids))
    done, total = 0, len(questions) * len(chosen)
    for question in questions:
        replies = answers(lm, [question.tokens], chosen, request)
        for key, reply in zip(names, replies, strict=True):
            right[key].append(question.number in reply.texts[0])
            done += 1
            on_progress(done, total)
    return right


def table(right: dict[str, list[bool]]) -> list[tuple[str, list[int]]]:
    """Percent right: a row for each choice of layers, a column for each of ``DECAYS``."""
    found: dict[str, list[int]] = {}
    for cell in cells():
        of_row = right[cell.name]
        label = {
            SHARED: f"one ranking, {cell.layer_weights} layer weights",
            PER_LAYER: "one ranking a layer",
            PER_HEAD: "one ranking a kv head",
        }[cell.retention]
        found.setdefault(label, []).append(round(100 * sum(of_row) / len(of_row)))
    return list(found.items())


def draw(title: str, right: dict[str, list[bool]]) -> bytes:
    """The table as a picture, PNG."""
    import matplotlib.pyplot as plt

    rows = table(right)
    figure, axes = plt.subplots(figsize=(7, 2.9), layout="constrained")
    values = [percents for _, percents in rows]
    axes.imshow(values, cmap="YlGn", vmin=0, vmax=130, aspect="auto")
    for y, percents in enumerate(values):
        for x, percent in enumerate(percents):
            axes.text(x, y, f"{percent}", ha="center", va="center")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_xticks(range(len(DECAYS)), [f"{decay:g}" for decay in DECAYS])
    axes.set_xlabel("decay: what a step leaves of the utilities")
    answered = right["full"]
    full = f"full cache: {100 * sum(answered) / len(answered):.0f}"
    figure.suptitle(f"{title} ({full})", fontsize=10)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    return picture.getvalue()
