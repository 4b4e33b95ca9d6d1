"""Batches of examples, and what policies answer to each: the records of a run."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from inertiakv_jax.eval import continuation
from inertiakv_jax.eval.continuation import Answers
from inertiakv_jax.eval.prompting import Prompting
from inertiakv_jax.eval.settings import Variant
from inertiakv_jax.eval.tasks.task import Example, Task
from inertiakv_jax.policy import Policy


@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples of one task that are decoded together, a row each."""

    task: Task
    examples: tuple[Example, ...]

    @property
    def work(self) -> int:
        """Characters of the prompts, a measure of time."""
        return sum(len(example.prompt) for example in self.examples)


def in_batches(examples: dict[Task, list[Example]], prompting: Prompting, size: int) -> list[Batch]:
    """Batches of one task (and length) each; those of several rows are of about one length."""
    found = []
    for task, asked in examples.items():
        groups: dict[str, list[Example]] = {}
        for example in asked:
            groups.setdefault(example.group, []).append(example)
        for group in groups.values():
            if size > 1:
                group.sort(key=lambda example: prompting.count_tokens(example.prompt))
            found += [
                Batch(task, tuple(group[start : start + size]))
                for start in range(0, len(group), size)
            ]
    return found


def run_batch(
    batch: Batch,
    variants: Sequence[Variant],
    prompting: Prompting,
    done: set[tuple[str, ...]],
) -> Iterator[list[dict[str, Any]]]:
    """Records of each variant that are not there yet; an empty list if all are."""
    missing = [
        variant
        for variant in variants
        if any((example.key, variant.label) not in done for example in batch.examples)
    ]
    for _ in range(len(variants) - len(missing)):
        yield []
    if not missing:
        return
    policies = [variant.make() for variant in missing]
    first = _answered(batch.examples, prompting, policies)
    for variant, policy, answers in zip(missing, policies, first, strict=True):
        thoughts = None
        final = answers
        if batch.task.follow_up is not None:
            thoughts = answers.texts
            second = tuple(map(batch.task.follow_up, batch.examples, thoughts))
            (final,) = _answered(second, prompting, [policy])
        yield [
            _record(batch.task, example, variant, policy, answers, final.texts[row], row)
            | ({} if thoughts is None else {"thoughts": thoughts[row]})
            for row, example in enumerate(batch.examples)
            if (example.key, variant.label) not in done
        ]


def _answered(examples, prompting: Prompting, policies) -> Iterator[Answers]:
    lm, first = prompting.lm, examples[0]
    newline: tuple[int, ...] = ()
    if first.ends_line:
        newline = (lm.tokenizer("\n", add_special_tokens=False)["input_ids"][-1],)
    ends = tuple(lm.eos_token_ids) + newline
    request = continuation.Request(
        max_new_tokens=first.max_new_tokens,
        stop_tokens=ends,
        not_first=ends if first.ends_line else (),
        rows=tuple(example.index for example in examples),
    )
    return continuation.answers(lm, [prompting.encode(e) for e in examples], policies, request)


def _record(
    task: Task,
    example: Example,
    variant: Variant,
    policy: Policy,
    answers: Answers,
    prediction: str,
    row: int,
) -> dict[str, Any]:
    kept, evicted = answers.kept_tokens[row], answers.evicted[row]
    should_evict = policy.evicts or policy.prefill is not None
    new_tokens = answers.new_tokens[row]
    if should_evict and "ratio" in variant.options and evicted == 0 and new_tokens > 1:
        raise ValueError(
            f"{variant.label} evicted nothing of {example.key} in {new_tokens} tokens: its score "
            "would be the full cache's"
        )
    rate = answers.decode_tokens / answers.decode_s if answers.decode_s else None
    return {
        "example": example.key,
        "variant": variant.label,
        "benchmark": task.benchmark,
        "group": example.group,
        "policy": variant.policy,
        "options": dict(variant.options),
        "scores": task.score(example, prediction),
        "prediction": prediction,
        "references": list(example.references),
        "tags": dict(example.tags),
        "prompt_tokens": answers.prompt_tokens[row],
        "new_tokens": new_tokens,
        "kept_tokens": kept,
        "evicted": evicted,
        "kept_fraction": kept / (kept + evicted),
        "should_evict": should_evict,
        "kv_bytes_full": answers.kv_bytes_full[row],
        "kv_bytes_kept": answers.kv_bytes_kept[row],
        "cost": {
            "batch": len(answers.texts),
            "kv_bytes_allocated": answers.kv_bytes_allocated,
            "prefill_s": answers.prefill_s,
            "prefill_shared": answers.prefill_shared,
            "decode_s": answers.decode_s,
            "decode_tokens_per_s": rate,
            "peak_bytes": peak_bytes(),
        },
    }


def peak_bytes() -> dict[str, int | None]:
    """Most memory that this process has held so far: of the device, and of the host."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    try:
        import resource
    except ImportError:  # no POSIX
        host = None
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"device": statistics.get("peak_bytes_in_use"), "host": host}
