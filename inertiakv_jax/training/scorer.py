"""Train the learned scorer: self-distillation on the attention scorer of the model itself.

Each step runs the frozen model once over a batch of texts, takes a few queries of each, and moves
the bilinear head towards what attention says of the tokens that they see, in every layer without a
sliding window at once. A run is a function of model, text and settings: interrupted and gone on
with, it ends with the same weights, bit for bit.
"""

import dataclasses
import hashlib
import math
import numbers
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inertiakv_jax.checks import check_field, is_count, is_positive_count
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.scoring import LearnedParams
from inertiakv_jax.state import num_eligible
from inertiakv_jax.training import text as training_text
from inertiakv_jax.training.agreement import Agreement, agreement, mean_agreement
from inertiakv_jax.training.checkpoints import Checkpoints
from inertiakv_jax.training.distillation import (
    TEXT_MULTIPLE,
    Recorded,
    distillation_loss,
    learned_scores,
    record,
    untrained,
)
from inertiakv_jax.training.text import Texts

try:
    import optax
except ImportError as error:
    raise ImportError(
        "training the scorer needs optax: pip install 'inertiakv-jax[train]'"
    ) from error

FIRST_QUERY = 64
"""Queries before this position are not looked at: nobody evicts from so short a text."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run depends on besides model and text. Hashable, static under jit.

    Attributes:
      steps: updates of the weights.
      batch_size: texts of each step.
      context: tokens of a text, a multiple of 64, at least 128.
      queries: of each text, drawn at random; each is taken in every layer.
      learning_rate: of Adam at the first step; falls to 0 along a cosine.
      held_out: texts that the head is judged by, at most; they are the last tenth or less.
      seed: of the head's first weights, the order of texts and the queries.

    Raises:
      ValueError: a value out of its range.
    """

    steps: int = 200
    batch_size: int = 1
    context: int = 512
    queries: int = 16
    learning_rate: float = 3e-3
    held_out: int = 8
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "queries", "held_out"):
            check_field(self, name, is_positive_count, "an integer >= 1")
        check_field(
            self,
            "context",
            lambda x: is_count(x) and x > FIRST_QUERY and x % TEXT_MULTIPLE == 0,
            f"a multiple of {TEXT_MULTIPLE} tokens above {FIRST_QUERY}",
        )
        check_field(
            self,
            "learning_rate",
            lambda x: isinstance(x, numbers.Real) and 0 < float(x) < math.inf,
            "a number above 0",
        )
        check_field(self, "seed", lambda x: is_count(x) and x < 2**32, "an integer below 2**32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from one step to the next; what a checkpoint holds."""

    weights: LearnedParams
    optimizer: Any  # optax's state
    key: Array  # [2] uint32, data of the random key that the next queries are drawn with
    step: Array  # [] int32, steps taken
    texts_read: Array  # [] int32, place in the stream of training texts


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
      weights: for ``learned_scorer.save_learned``.
      before: agreement of the untrained head.
      after: of the trained one.
      losses: of the steps that this process took.
      resumed_at: steps that were taken before, by another process.
    """

    weights: LearnedParams
    before: Agreement
    after: Agreement
    losses: tuple[float, ...]
    resumed_at: int


def train(
    lm: LanguageModel,
    text: str,
    settings: Settings | None = None,
    *,
    checkpoints: Path | None = None,
    checkpoint_every: int = 50,
    on_step: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train a head on a text, or go on with a run that was interrupted.

    Args:
      lm: from ``load``; its parameters stay as they are.
      text: the more, the better; its last tenth or less is held out.
      settings: None takes the defaults.
      checkpoints: folder of this run's checkpoints, made if missing; a run begins with the newest.
        None: none are written.
      checkpoint_every: steps between two; the last step has one, too.
      on_step: called after each step with its number, from 1 on, and its loss.

    Returns:
      The weights, and how well they rank text that they were not trained on.

    Raises:
      ValueError: a text too short, a context beyond the model's positions, a model whose layers all
        have sliding windows, a folder that cannot be written to or holds another run's checkpoints;
        before the model runs.
      FloatingPointError: a loss was NaN or infinite.

    Source: arXiv 2609.03515 appendix E.
    """
    settings = settings or Settings()
    if not is_positive_count(checkpoint_every):
        raise ValueError(f"checkpoint_every must be an integer >= 1, got {checkpoint_every!r}")
    _check_model(lm, settings)
    texts = training_text.cut(lm, text, settings.context, settings.held_out)
    fresh = _initial_state(lm, settings)
    saved = None
    if checkpoints is not None:
        saved = Checkpoints(checkpoints, _description(lm, texts, settings))
    with saved or nullcontext():
        state = fresh if saved is None else saved.restore(fresh)
        resumed_at, losses = int(state.step), []
        before = evaluate(lm, fresh.weights, texts.held_out, settings)
        for step in range(resumed_at + 1, settings.steps + 1):
            state, loss = _take_step(lm, texts, settings, state)
            losses.append(_finite(float(loss), step))
            if saved is not None and (step % checkpoint_every == 0 or step == settings.steps):
                saved.save(step, state)
            if on_step is not None:
                on_step(step, losses[-1])
    after = evaluate(lm, state.weights, texts.held_out, settings)
    return Trained(state.weights, before, after, tuple(losses), resumed_at)


def evaluate(
    lm: LanguageModel, weights: LearnedParams, texts: np.ndarray, settings: Settings
) -> Agreement:
    """Agreement of a head with attention on texts [h, T], at queries spread evenly over each."""
    places = np.linspace(FIRST_QUERY, settings.context - 1, settings.queries).astype(np.int32)
    found = []
    for text in texts:
        recorded = _record(lm.model, lm.params, text[None], places[None])
        loss, scores = jax.device_get(_judge(weights, recorded))
        target, seen = jax.device_get((recorded.log_attention[:, 0], recorded.seen[0]))
        found.append(agreement(float(loss), scores, target, seen))
    return mean_agreement(found)


def _check_model(lm: LanguageModel, settings: Settings) -> None:
    if num_eligible(lm.model) == 0:
        raise ValueError(f"all layers of {lm.name} have sliding windows: none is ever scored")
    if settings.context > lm.model.max_positions:
        raise ValueError(
            f"context must be at most the model's {lm.model.max_positions} positions, got "
            f"{settings.context}"
        )


def _initial_state(lm: LanguageModel, settings: Settings) -> TrainState:
    key, first = jax.random.split(jax.random.key(settings.seed))
    weights = untrained(first, lm.model)
    return TrainState(
        weights=weights,
        optimizer=_optimizer(settings).init(weights),
        key=jax.random.key_data(key),
        step=jnp.int32(0),
        texts_read=jnp.int32(0),
    )


def _optimizer(settings: Settings) -> Any:  # optax's types know of no dataclass that is a tree
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def _take_step(
    lm: LanguageModel, texts: Texts, settings: Settings, state: TrainState
) -> tuple[TrainState, Array]:
    tokens = texts.batch(int(state.texts_read), settings.batch_size, settings.seed)
    key, now = jax.random.split(jax.random.wrap_key_data(state.key))
    shape = (settings.batch_size, settings.queries)
    positions = jax.random.randint(now, shape, FIRST_QUERY, settings.context, jnp.int32)
    recorded = _record(lm.model, lm.params, tokens, positions)
    state = dataclasses.replace(state, key=jax.random.key_data(key))
    return _update(settings, state, recorded)


# Apart from the update, so that training and evaluation share the one large program.
_record = jax.jit(record, static_argnames="model")


@partial(jax.jit, static_argnames="settings")
def _update(settings: Settings, state: TrainState, recorded: Recorded) -> tuple[TrainState, Array]:
    def loss_of(weights):
        return distillation_loss(learned_scores(weights, recorded), recorded)

    loss, gradient = jax.value_and_grad(loss_of)(state.weights)
    with jax.numpy_dtype_promotion("standard"):  # optax takes an int to the power of a float
        updates, optimizer = _optimizer(settings).update(gradient, state.optimizer)
    state = dataclasses.replace(
        state,
        weights=jax.tree.map(jnp.add, state.weights, updates),
        optimizer=optimizer,
        step=state.step + 1,
        texts_read=state.texts_read + settings.batch_size,
    )
    return state, loss


@jax.jit
def _judge(weights: LearnedParams, recorded: Recorded) -> tuple[Array, Array]:
    """Loss, and scores [E, Q, T] of the one row."""
    scores = learned_scores(weights, recorded)
    return distillation_loss(scores, recorded), scores[:, 0]


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss of step {step} is {loss}; are the model's weights sound, and is the "
            "learning rate low enough?"
        )
    return loss


def _description(lm: LanguageModel, texts: Texts, settings: Settings) -> dict[str, dict[str, Any]]:
    """What two runs must share for one to go on with the other's checkpoints."""
    config = dataclasses.asdict(lm.config)
    return {
        "settings": dataclasses.asdict(settings),
        "model": {
            "config": _digest(repr(config).encode()),
            "dtype": str(lm.model.dtype),
            "parameters": _digest(*_samples(lm.params)),
        },
        "text": {"tokens": _digest(texts.training.tobytes(), texts.held_out.tobytes())},
    }


def _samples(params: Any) -> list[bytes]:
    """The first numbers of every array: enough to tell a model from another trained like it."""
    return [
        np.asarray(leaf[(0,) * (leaf.ndim - 1)][:64]).tobytes() for leaf in jax.tree.leaves(params)
    ]


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
