"""``inertiakv eval``: policies on LongBench, LongBench-v2, RULER and needles in haystacks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import arg

from inertiakv_jax.commands.devices import (
    CoordinatorOption,
    MeshOption,
    NumberOption,
    mesh_of,
)
from inertiakv_jax.commands.terminal import console
from inertiakv_jax.files import check_folder

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax.eval.runner import Progress as RunProgress
    from inertiakv_jax.eval.settings import Settings

DESCRIPTION = """Evaluate policies on long-context benchmarks.

Prompts and scores are the official ones. Settings come from --config, a YAML file or one that comes
along (eval/ruler-small, paper/longbench); flags go before them. Results go to --out, one JSON line
per example and policy; the same command goes on where it was stopped. `inertiakv report` makes
tables and figures of them.

Needs the extra 'eval': pip install 'inertiakv-jax[eval]'.

Examples:
  inertiakv eval --config eval/ruler-small --out runs/ruler
  inertiakv eval --tasks vt fwe --lengths 1024 --policies full lazy4 --samples 5 --out runs/vt
  inertiakv eval --config paper/longbench --coordinator auto --mesh model=4 --out runs/longbench
"""

_NOT_SETTINGS = (
    *("out", "config", "shard", "mesh"),
    *("coordinator", "num_processes", "process_id"),
)
_NONE_SHOWN = arg(help_behavior_hint="")


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Options of ``inertiakv eval``. None is what the configuration says, or its default."""

    out: Annotated[Path, arg(metavar="FOLDER")]
    """Folder of the run: made, or gone on with."""
    config: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """YAML file, or the name of one that comes along."""
    model: Annotated[str | None, _NONE_SHOWN] = None
    """Catalogue name, hub id, folder with config.json, or .gguf file (default: smollm2-135m)."""
    dtype: Annotated[str | None, _NONE_SHOWN] = None
    """float32 or bfloat16."""
    tasks: Annotated[tuple[str, ...] | None, _NONE_SHOWN] = None
    """Tasks or groups: longbench, longbench-e, longbench-paper, longbench-v2, longbench-v2-cot,
    ruler, ruler-niah, ruler-local, needle, or any task of them."""
    policies: Annotated[tuple[str, ...] | None, _NONE_SHOWN] = None
    """Names of policies; their options can be set in a configuration."""
    ratios: Annotated[tuple[float, ...] | None, _NONE_SHOWN] = None
    """Fractions of the prompt's cache removed, in [0, 1)."""
    lengths: Annotated[tuple[int, ...] | None, _NONE_SHOWN] = None
    """Tokens of generated examples (RULER, needle), prompt and answer."""
    samples: Annotated[int | None, _NONE_SHOWN] = None
    """Examples of each task and length, at most."""
    seed: Annotated[int | None, _NONE_SHOWN] = None
    """Of generated examples."""
    haystack: Annotated[str | None, _NONE_SHOWN] = None
    """Of the needle grid: essay or noise."""
    batch: Annotated[int | None, _NONE_SHOWN] = None
    """Rows decoded together."""
    max_prompt_tokens: Annotated[int | None, _NONE_SHOWN] = None
    """Longer prompts of LongBench lose their middle."""
    data_dir: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Folder with longbench/*.jsonl, longbench-v2/data.json, ruler/*.json, instead of the hub."""
    shard: Annotated[str, arg(metavar="I/N")] = "0/1"
    """This process' part of a run that N share without knowing of each other."""
    mesh: MeshOption = None
    """Devices that share the work, like data=4,model=2: rows over data, heads over model. Each of
    several processes has its own; one larger than the devices of a process spans several."""
    coordinator: CoordinatorOption = None
    """Of a job of several processes, which share the examples: where the first one listens; auto
    on TPU pods and under Slurm. Or JAX_COORDINATOR_ADDRESS in the environment, like the others."""
    num_processes: NumberOption = None
    """Processes of the job."""
    process_id: NumberOption = None
    """Which of them this is, from 0."""

    def run(self) -> None:
        """Evaluate and say where the results are."""
        log = console()
        shard, shards = parse_shard(self.shard)
        settings = self.settings()
        from inertiakv_jax import distributed
        from inertiakv_jax.eval import requirements, runner
        from inertiakv_jax.weights.load import load

        requirements.check_packages(settings)
        distributed.join(self.coordinator, self.num_processes, self.process_id)
        distributed.together(lambda: check_folder(self.out))
        mesh = mesh_of(self.mesh, settings.batch)
        log.print(f"Loading {settings.model}")
        lm = distributed.together(
            lambda: load(
                settings.model, dtype=settings.dtype, revision=settings.revision, mesh=mesh
            )
        )
        log.print("Making the examples")
        with _progress(log) as on_progress:
            runner.run(settings, lm, self.out, shard=shard, shards=shards, on_progress=on_progress)
        log.print(f"Done. Tables and figures: inertiakv report {self.out}")

    def settings(self) -> "Settings":
        """The configuration with the flags put into it.

        Raises:
          ValueError: a value of either is out of range.
        """
        from inertiakv_jax.eval.settings import Settings, read_config

        fields: dict[str, Any] = {"model": "smollm2-135m"}
        if self.config is not None:
            fields |= read_config(self.config)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in _NOT_SETTINGS:
                fields[field.name] = str(value) if isinstance(value, Path) else value
        if "tasks" not in fields:
            raise ValueError("say what to evaluate: --tasks, or a --config that names them")
        return Settings(**fields)


def parse_shard(text: str) -> tuple[int, int]:
    """The two numbers of "I/N".

    >>> parse_shard("2/4")
    (2, 4)
    """
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--shard must be I/N with I in 0 .. N-1, got {text!r}")
    return int(part), int(parts)


@contextlib.contextmanager
def _progress(log: Console) -> Iterator[Callable[["RunProgress"], None]]:
    """A bar with the time left on a terminal; elsewhere a line for each task."""
    if not log.is_terminal:
        seen: list[str] = []

        def print_line(now: "RunProgress") -> None:
            if seen[-1:] != [now.group]:
                seen.append(now.group)
                log.print(f"{now.group}: {now.examples} of {now.total} records")

        yield print_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[records]} records"),
    )
    with Progress(*columns, console=log) as bar:
        # By the length of prompts: a count of examples would tell little of the time left.
        task = bar.add_task("compiling", total=None, records=0)

        def advance(now: "RunProgress") -> None:
            bar.update(
                task,
                description=now.group,
                completed=now.work,
                total=now.total_work,
                records=f"{now.examples}/{now.total}",
            )

        yield advance
