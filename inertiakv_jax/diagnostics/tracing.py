"""What policies keep of one text, step by step, and how their rankings compare.

All policies see the same tokens: a continuation is forced on them, the full cache's own or a given
one. A full cache runs alongside and scores every token at every step, evicted or not.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inertiakv_jax.checks import is_positive_count
from inertiakv_jax.diagnostics.cache_run import ATTENTION, CacheRun, Recorder, read
from inertiakv_jax.diagnostics.measures import by_layer, jaccard
from inertiakv_jax.diagnostics.records import WITHOUT_EMA, Trace, TracedRun
from inertiakv_jax.diagnostics.traced_policy import TracedPolicy
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policy import Policy, check_policy
from inertiakv_jax.prefilling import ReadPrompts, full_slots
from inertiakv_jax.prompt_input import check_lengths
from inertiakv_jax.prompt_thinning import observing_of
from inertiakv_jax.state import PER_HEAD, SHARED
from inertiakv_jax.text import Prompt, encode_prompts, with_repetition

Progress = Callable[[int, int], None]
"""Told how many steps of all runs are done, and how many there are."""


def trace(
    lm: LanguageModel,
    prompt: Prompt,
    policies: Sequence[Policy],
    *,
    steps: int = 32,
    continuation: str | Sequence[int] | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Trace:
    """Run policies over one forced continuation.

    Args:
      lm: from ``load``.
      prompt: a text, a chat or token ids.
      policies: at least one, of distinct names.
      steps: decode steps, at least 1. They go on behind an end token.
      continuation: text or token ids of at least ``steps`` tokens; None takes the full cache's
        greedy one.
      on_progress: called after every step of a run.

    Returns:
      What each policy kept, and the measures of ``docs/diagnostics.md``.

    Raises:
      ValueError: no policies, two of one name, random or learned scorers that differ in seed or
        weights, a continuation that is too short, or what ``generate`` refuses; before anything is
        compiled.
      FloatingPointError: logits held NaN or infinity.

    Source: arXiv 2609.03515 section 5 (figure 1, churn, rank correlation); which sets are compared
    is said in ``docs/diagnostics.md``.
    """
    if not is_positive_count(steps):
        raise ValueError(f"steps must be an integer of at least 1, got {steps!r}")
    observer = _observer(policies)
    policies = [with_repetition(policy, lm) for policy in policies]
    (ids,) = encode_prompts(lm, [prompt])
    forced = None if continuation is None else _forced(lm, continuation, steps)
    lengths = np.asarray([len(ids)], np.int32)
    check_lengths(lm.model, lengths, steps)
    for policy in policies:
        policy.budgets(lengths, lm.model)
        if policy.prefill is not None:
            policy.prefill.check(lengths, lm.model)
    scorers = tuple(dict.fromkeys((ATTENTION, *(policy.scorer for policy in policies))))
    recorder = Recorder(scorers, observer.knobs(lm.model))

    read_by_full, *prompt_reads = _read(lm, ids, (observer, *policies), steps)
    full = CacheRun(lm, read_by_full, observer, steps, recorder)
    traced: list[TracedPolicy] = []
    tokens, full_chosen = [], []
    total = steps * (len(policies) + 1)
    for index in range(steps):
        tokens.append(full.chosen if forced is None else forced[index])
        seen_by_full = full.step(tokens[-1])
        full_chosen.append(full.chosen)
        for number, policy in enumerate(policies):
            if index == 0:  # not before: its first step shrinks its copy of the prompt's cache
                traced.append(TracedPolicy(lm, prompt_reads[number], policy, steps, recorder))
            traced[number].step(tokens[-1], seen_by_full)
            on_progress(index * (len(policies) + 1) + number + 2, total)
    runs = tuple(run.traced() for run in traced)
    return Trace(
        config=_config(lm, len(ids), steps, greedy=forced is None),
        prompt=tuple(ids),
        continuation=tuple(tokens),
        full_chosen=np.asarray(full_chosen, np.int32),
        runs=runs,
        kept_jaccard=_kept_jaccard(runs, steps),
    )


def _read(
    lm: LanguageModel, prompt: Sequence[int], policies: Sequence[Policy], steps: int
) -> list[ReadPrompts]:
    """The prompt in a cache for each policy; read once for those that note the same of it."""
    lengths = np.asarray([len(prompt)], np.int32)
    slots = max(full_slots(lm.model, policy, lengths, steps) for policy in policies)
    reads: dict[Any, ReadPrompts] = {}
    for policy in policies:
        if (kind := observing_of(policy)) not in reads:
            reads[kind] = read(lm, prompt, policy, steps, slots)
    return [reads[observing_of(policy)] for policy in policies]


def _kept_jaccard(runs: Sequence[TracedRun], steps: int) -> Mapping[tuple[str, str], np.ndarray]:
    """Of each pair of runs by name [steps, E or 1]."""
    return {
        (first.name, second.name): np.stack(
            [by_layer(jaccard(first.kept(step), second.kept(step))) for step in range(1, steps + 1)]
        )
        for first, second in itertools.combinations(runs, 2)
    }


def without_ema(policy: Policy) -> Policy | None:
    """The policy with alpha 0: scores of one step, of the last layer where layers share a ranking.

    None for a policy that has no moving average: its own is that already, or it scores nothing.

    Source: arXiv 2609.03515 figure 1, section 5.
    """
    if not policy.evicts or policy.decay == 0 or (policy.decay is None and policy.alpha == 0):
        return None
    return dataclasses.replace(
        policy,
        name=policy.name + WITHOUT_EMA,
        decay=0.0,
        layer_weights="last",
        prompt_queries=0,
    )


def _observer(policies: Sequence[Policy]) -> Policy:
    """The full cache, with what the policies' scorers need."""
    if isinstance(policies, Policy) or not policies:
        raise ValueError(f"policies must be a list of at least one Policy, got {policies!r:.80}")
    for policy in policies:
        check_policy(policy)
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise ValueError(
            f"policies must have distinct names, got {', '.join(names)}; "
            "dataclasses.replace(policy, name=...) gives another"
        )
    seeds = {policy.seed for policy in policies if policy.scorer == "random"}
    weights = {policy.scorer_weights for policy in policies if policy.scorer == "learned"}
    for what, found in (("random", seeds), ("learned", weights)):
        if len(found) > 1:
            raise ValueError(f"policies with the scorer {what!r} must share theirs, got {found}")
    per_head = any(policy.retention == PER_HEAD for policy in policies)
    return Policy(
        "full",
        ratio=0.0,
        retention=PER_HEAD if per_head else SHARED,  # others are means over heads
        seed=min(seeds, default=0),
        scorer="learned" if weights else ATTENTION,
        scorer_weights=next(iter(weights), None),
    )


def _forced(lm: LanguageModel, continuation: str | Sequence[int], steps: int) -> list[int]:
    if isinstance(continuation, str):
        continuation = lm.tokenizer(continuation, add_special_tokens=False)["input_ids"]
    if len(continuation) < steps:
        raise ValueError(
            f"the continuation has {len(continuation)} tokens, fewer than {steps} steps"
        )
    try:
        (ids,) = encode_prompts(lm, [continuation])
    except ValueError as error:
        raise ValueError(f"continuation: {error}") from error
    return ids[:steps]


def _config(
    lm: LanguageModel, prompt_tokens: int, steps: int, *, greedy: bool
) -> Mapping[str, Any]:
    return {
        "model": lm.name,
        **model_sizes(lm),
        "dtype": str(jnp.dtype(lm.model.dtype)),
        "prompt_tokens": prompt_tokens,
        "steps": steps,
        "continuation": "greedy" if greedy else "given",
        "device": jax.devices()[0].device_kind,
        "inertiakv_jax": metadata.version("inertiakv-jax"),
        "jax": jax.__version__,
    }


def model_sizes(lm: LanguageModel) -> Mapping[str, int]:
    """What tells models apart whose traces cannot be each other's."""
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")
    return {name: getattr(lm.config, name) for name in names}
