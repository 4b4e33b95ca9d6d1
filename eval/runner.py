"""Evaluate policies on tasks over one loaded model, one record per example and policy."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from inertiakv_jax.distributed import together
from inertiakv_jax.eval import continuation, job, records
from inertiakv_jax.eval.continuation import Answers
from inertiakv_jax.eval.description import description
from inertiakv_jax.eval.prompting import Prompting
from inertiakv_jax.eval.records import RecordFile
from inertiakv_jax.eval.settings import Settings, Variant
from inertiakv_jax.eval.sources import Sources
from inertiakv_jax.eval.tasks.catalogue import tasks_named
from inertiakv_jax.eval.tasks.task import Example, Request, Task
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.policy import Policy

_MOST_MAPPINGS = 40_000
"""Memory mappings of compiled programs before they are forgotten; Linux lets a process have
65,530, then LLVM aborts."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What ``run`` says as it goes.

    Attributes:
      examples: records written or found, of all.
      total: records wanted.
      work: characters of prompts answered, of ``total_work``, a measure of time.
      total_work: of all.
      group: task (and length) at hand.
    """

    examples: int
    total: int
    work: int
    total_work: int
    group: str


@dataclasses.dataclass(frozen=True)
class _Batch:
    task: Task
    examples: tuple[Example, ...]

    @property
    def work(self) -> int:
        return sum(len(example.prompt) for example in self.examples)


def run(
    settings: Settings,
    lm: LanguageModel,
    folder: Path,
    *,
    shard: int = 0,
    shards: int = 1,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Evaluate, or go on where an earlier run of the same settings stopped.

    Each batch of examples is read once for all policies that allow it. A batch is always made of
    the same examples, so a resumed run gives what an undisturbed one gives. The processes of a job
    (``distributed.join``) share the batches, each writing down its own; at the end the first puts
    all of them into one file. How many there are may change from one start to the next.

    Args:
      settings: what to evaluate.
      lm: the model named there, loaded.
      folder: of the run; made if missing. Processes of a job may have one each.
      shard: this host's part, 0 .. shards - 1, where the hosts do not know of each other.
      shards: hosts that share the run; each takes every so many-th batch and writes its own file.
      on_progress: called after each policy of a batch.

    Raises:
      ValueError: data that is missing, a prompt that does not fit, a folder of another run, or a
        policy that should evict and does not.
      FloatingPointError: logits held NaN or infinity.
      PeerError: another process of the job failed.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard must be in 0 .. {shards - 1}, got {shard}")
    if jax.process_count() > 1:
        if shards > 1:
            raise ValueError("the processes of a job share it by themselves; leave out the shard")
        shard, shards = jax.process_index(), jax.process_count()
    prompting = Prompting(lm, settings.chat, settings.max_prompt_tokens)
    batches, found = together(lambda: _started(settings, prompting, folder))
    job.check_alike(records.read_description(folder))
    variants = settings.variants()
    part = _Part(batches[shard::shards], variants, job.known_to_any(found))
    path = records.record_path(folder, shard, shards)
    together(lambda: _run_part(part, prompting, path, on_progress))
    if shards == 1 or jax.process_count() > 1:
        order = [
            (example.key, variant.label)
            for batch in batches
            for variant in variants
            for example in batch.examples
        ]
        found = job.put_together(folder, order)
    else:
        found = records.read_records(folder)
    check_evictions(found)


def _started(
    settings: Settings, prompting: Prompting, folder: Path
) -> tuple[list["_Batch"], list[dict[str, Any]]]:
    """All batches of the run, and the records that the folder has already."""
    examples = _examples(settings, prompting)
    records.start_or_resume(folder, description(settings, prompting.lm, examples))
    return _batches(examples, prompting, settings.batch), records.read_records(folder)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one process does of a run: ``done`` are keys of records that are there already."""

    batches: list["_Batch"]
    variants: list[Variant]
    done: set[tuple[str, ...]]


def _run_part(
    part: _Part, prompting: Prompting, path: Path, on_progress: Callable[[Progress], None]
) -> None:
    total = sum(len(batch.examples) for batch in part.batches) * len(part.variants)
    total_work = sum(batch.work for batch in part.batches) * len(part.variants)
    work = examples = 0
    with RecordFile(path) as file:
        for batch in part.batches:
            for record_list in _run_batch(batch, part.variants, prompting, part.done):
                for record in record_list:
                    file.append(record)
                work += batch.work
                examples += len(batch.examples)
                group = batch.examples[0].group
                on_progress(Progress(examples, total, work, total_work, group))
            _forget_programs_if_many()


def check_evictions(found: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for a policy that should evict and has not, in any example.

    Its scores would be the full cache's.
    """
    evicted: dict[str, int] = {}
    for record in found:
        if record["should_evict"]:
            label = record["variant"]
            evicted[label] = evicted.get(label, 0) + record["evicted"]
    idle = [label for label, count in evicted.items() if count == 0]
    if idle:
        raise ValueError(
            f"{', '.join(idle)} evicted nothing in any example: the scores are those of the full "
            "cache"
        )


def _examples(settings: Settings, prompting: Prompting) -> dict[Task, list[Example]]:
    request = Request(
        sources=Sources(None if settings.data_dir is None else Path(settings.data_dir)),
        count_tokens=prompting.count_tokens,
        template_tokens=prompting.template_tokens,
        lengths=settings.lengths,
        samples=settings.samples,
        seed=settings.seed,
        haystack=settings.haystack,
        depths=settings.depths,
    )
    return {task: task.examples(request) for task in tasks_named(settings.tasks)}


def _batches(examples: dict[Task, list[Example]], prompting: Prompting, size: int) -> list[_Batch]:
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
                _Batch(task, tuple(group[start : start + size]))
                for start in range(0, len(group), size)
            ]
    return found


def _run_batch(
    batch: _Batch,
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


def _forget_programs_if_many() -> None:
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()
