"""A trace's tokens and evictions forced on a cache anew."""

import dataclasses
from collections.abc import Callable

import numpy as np

from inertiakv_jax.diagnostics.cache_run import ATTENTION, CacheRun, Recorder, read
from inertiakv_jax.diagnostics.records import Trace, TracedRun
from inertiakv_jax.diagnostics.tracing import Progress, model_sizes
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policy import Policy
from inertiakv_jax.prefilling import ReadPrompts
from inertiakv_jax.prompt_input import check_lengths
from inertiakv_jax.state import PER_HEAD, SHARED, num_eligible, slots_for
from inertiakv_jax.text import encode_prompts


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One run of a trace, its evictions forced on a cache anew.

    Attributes:
      name: of the run.
      chosen: [steps] int32, the most likely token after each step.
      chosen_logit: [steps] float32, its logit.
      same_tokens: steps after which the most likely token is the trace's.
      logit_difference: largest difference of ``chosen_logit`` from the trace's.
    """

    name: str
    chosen: np.ndarray
    chosen_logit: np.ndarray
    same_tokens: int
    logit_difference: float


def replay(
    lm: LanguageModel,
    trace: Trace,
    *,
    on_progress: Progress = lambda done, total: None,
) -> tuple[Replayed, ...]:
    """Force a trace's tokens and evictions on a model, without scoring anything.

    With the model, dtype and machine that the trace was made with, tokens and logits are the same
    bit for bit.

    Args:
      lm: of the trace's layers, kv heads and vocabulary.
      trace: from ``trace`` or ``read_trace``.
      on_progress: called after every step of a run.

    Returns:
      One for each run.

    Raises:
      ValueError: a trace of another kind of model, or one that does not fit its positions; before
        anything is compiled.
      FloatingPointError: logits held NaN or infinity.
    """
    _check_replay(lm, trace)
    steps = len(trace.continuation)
    total, replayed = steps * len(trace.runs), []
    full, slots = (
        Policy("full", ratio=0.0),
        max((run.prompt_slots for run in trace.runs), default=0),
    )
    prompt = read(lm, trace.prompt, full, steps, least_slots=slots)
    for number, run in enumerate(trace.runs):
        done = number * steps
        replayed.append(
            _replay(lm, prompt, trace, run, lambda step, done=done: on_progress(done + step, total))
        )
    return tuple(replayed)


def _replay(
    lm: LanguageModel,
    prompt: ReadPrompts,
    trace: Trace,
    run: TracedRun,
    on_step: Callable[[int], None],
) -> Replayed:
    # Of the policy, only the sizes of the caches are needed, and who shares a ranking.
    policy = Policy(
        run.name,
        tokens=run.slots - 1 if run.evicts else None,
        ratio=None if run.evicts else 0.0,
        retention=run.retention,
    )
    recorder = Recorder((ATTENTION,), policy.knobs(lm.model))
    cache = CacheRun(lm, prompt, policy, len(trace.continuation), recorder)
    cache.thin_out_as_told(run.evicted_at, run.prompt_slots)
    chosen, logits = [], []
    for index, token in enumerate(trace.continuation):
        cache.step_as_told(token, run.evicted_at)
        chosen.append(cache.chosen)
        logits.append(cache.chosen_logit)
        on_step(index + 1)
    chosen, logits = np.asarray(chosen, np.int32), np.asarray(logits, np.float32)
    return Replayed(
        name=run.name,
        chosen=chosen,
        chosen_logit=logits,
        same_tokens=int((chosen == run.chosen).sum()),
        logit_difference=float(np.abs(logits - run.chosen_logit).max()),
    )


def _check_replay(lm: LanguageModel, trace: Trace) -> None:
    sizes = model_sizes(lm)
    traced = {name: trace.config.get(name) for name in sizes}
    if traced != sizes:
        raise ValueError(f"the trace is of a model of {traced}, not of {lm.name} with {sizes}")
    model, steps = lm.model, len(trace.continuation)
    encode_prompts(lm, [trace.prompt, trace.continuation])  # ids of the vocabulary
    check_lengths(model, np.asarray([len(trace.prompt)]), steps)
    most = slots_for(model.max_positions + 1, multiple=256)
    for run in trace.runs:
        rankings = (
            1 if run.retention == SHARED else num_eligible(model),
            model.num_kv_heads if run.retention == PER_HEAD else 1,
        )
        if run.evicted_at.shape[:2] != rankings:
            raise ValueError(
                f"run {run.name!r} has rankings of {run.evicted_at.shape[:2]} layers and heads, "
                f"the model has {rankings} at retention {run.retention!r}"
            )
        if not 1 < run.slots <= most or run.prompt_slots > most:
            raise ValueError(
                f"run {run.name!r} has {run.prompt_slots} and {run.slots} slots, but the model's "
                f"positions fill {most}"
            )
