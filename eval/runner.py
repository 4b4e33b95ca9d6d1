"""Evaluate policies on tasks over one loaded model, one record per example and policy."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from inertiakv_jax.distributed import together
from inertiakv_jax.eval import job, records
from inertiakv_jax.eval.batches import Batch, in_batches, run_batch
from inertiakv_jax.eval.description import description
from inertiakv_jax.eval.prompting import Prompting
from inertiakv_jax.eval.records import RecordFile
from inertiakv_jax.eval.settings import Settings, Variant
from inertiakv_jax.eval.sources import Sources
from inertiakv_jax.eval.tasks.catalogue import tasks_named
from inertiakv_jax.eval.tasks.task import Example, Request, Task
from inertiakv_jax.language_model import LanguageModel

_MOST_MAPPINGS = 16_000
"""Memory mappings of compiled programs before they are forgotten: on a CPU about 4 GB of them
(measured: 10 GB at 40,000). Linux lets a process have 65,530, then LLVM aborts."""


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
    (``distributed.join``) share the batches, each writing down its own; those whose devices the
    model's mesh spans take the same ones, and the first of them writes. At the end process 0 puts
    all records into one file. How many processes there are may change from one start to the next.

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
        share = job.share_of(lm.mesh)
    else:
        share = job.Share(shard, shards)
    prompting = Prompting(lm, settings.chat, settings.max_prompt_tokens)
    batches, found = together(lambda: _started(settings, prompting, folder))
    job.check_alike(records.read_description(folder))
    variants = settings.variants()
    part = _Part(batches[share.shard :: share.shards], variants, job.known_to_any(found))
    path = records.record_path(folder, share.shard, share.shards) if share.writes else None
    share.do(lambda: _run_part(part, prompting, path, on_progress))
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
) -> tuple[list[Batch], list[dict[str, Any]]]:
    """All batches of the run, and the records that the folder has already."""
    examples = _examples(settings, prompting)
    records.start_or_resume(folder, description(settings, prompting.lm, examples))
    return in_batches(examples, prompting, settings.batch), records.read_records(folder)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one process does of a run: ``done`` are keys of records that are there already."""

    batches: list[Batch]
    variants: list[Variant]
    done: set[tuple[str, ...]]


def _run_part(
    part: _Part, prompting: Prompting, path: Path | None, on_progress: Callable[[Progress], None]
) -> None:
    total = sum(len(batch.examples) for batch in part.batches) * len(part.variants)
    total_work = sum(batch.work for batch in part.batches) * len(part.variants)
    work = examples = 0
    with contextlib.nullcontext() if path is None else RecordFile(path) as file:
        for batch in part.batches:
            for record_list in run_batch(batch, part.variants, prompting, part.done):
                if file is not None:
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
    found = {task: task.examples(request) for task in tasks_named(settings.tasks)}
    empty = [task.name for task, examples in found.items() if not examples]
    if empty:
        raise ValueError(f"there are no examples of {', '.join(empty)}")
    return found


def _forget_programs_if_many() -> None:
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()
