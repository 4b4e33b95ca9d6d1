"""``inertiakv trace``: what policies keep of one text, measured, drawn, and replayed."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tyro.conf import UseAppendAction, arg

from inertiakv_jax.commands.devices import MeshOption
from inertiakv_jax.commands.generate import STDIN, read_prompt
from inertiakv_jax.commands.terminal import (
    check_output,
    console,
    output_console,
    plain_table,
    write_file,
)
from inertiakv_jax.files import make_folder

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax import diagnostics
    from inertiakv_jax.language_model import LanguageModel
    from inertiakv_jax.policy import Policy

DESCRIPTION = """Trace what policies keep of one text, step by step.

All are made to read the same tokens. Writes trace.json and three pictures, and prints how alike
kept sets and rankings are. A trace can be replayed: its evictions are forced on the model anew,
which must choose the same tokens.

Examples:
  inertiakv trace --prompt-file report.txt --policy inertiakv --policy vnorm --policy tova
  inertiakv trace --policy inertiakv --policy inertiakv,alpha=0.95 --policy tova,ratio=0.8
  inertiakv trace --replay inertiakv_trace/trace.json
"""
DEFAULT_POLICIES = (
    "inertiakv",
    "vnorm",
    "entropy",
    *(f"inertiakv,scorer={scorer}" for scorer in ("keydiff", "knorm", "recency", "random")),
)
TRACE, KEPT_SETS, KEPT_OVER_STEPS, BOUNDARY = (
    *("trace.json", "kept_sets.png", "kept_over_steps.png", "boundary.png"),
)
COLUMNS = {
    "spearman_held": "rank corr.",
    "spearman_held_aggregated": "of utilities",
    "raw_churn": "raw churn",
    "aggregated_churn": "churn",
    "aggregated_small_change": "<= 1 new",
    "raw_evicted": "raw evicted",
}
"""Headings of the measures in the table."""
LEGEND = (
    "kept: tokens held at the end. Jaccard: of what is held, with the first policy. rank corr.: of "
    "scores with attention's; of utilities: of what is ranked by. raw churn: share of a step's top "
    "scores that is new; churn: of its top utilities; <= 1 new: steps with at most one new there. "
    "raw evicted: share of a step's top scores that is gone. as full: steps that choose the full "
    "cache's token."
)

PROSE_TOKENS = 1000


@dataclasses.dataclass(frozen=True)
class Trace:
    """Options of ``inertiakv trace``."""

    model: str = "smollm2-135m"
    """Catalogue name, hub id, folder with config.json, or .gguf file."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    mesh: MeshOption = None
    """Devices that share the work, like model=4: heads over model; there is one row."""
    prompt_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Text to read, - for standard input; without it, prose as of `inertiakv demo`."""
    prompt_tokens: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: all, or 1000 of prose)")
    ] = None
    """Read only so many tokens of the file; without one, about so many of prose."""
    seed: int = 0
    """Of the prose."""
    continuation_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Text to go on with; without it, what the full cache goes on with."""
    policy: UseAppendAction[tuple[str, ...]] = ()
    """A policy to trace, as `inertiakv generate` takes it: a method, with options behind commas
    (tova,tokens=64), A+B, or a .yaml file. May be given again; without it, each scorer under the
    paper's moving average."""
    ratio: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.9)")] = None
    """Fraction of the prompt's cache removed, in [0, 1), for policies that do not say."""
    steps: int = 32
    """Decode steps."""
    ema_only: bool = False
    """Do not trace each policy a second time without its moving average."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("inertiakv_trace")
    """Where the trace and the pictures go."""
    replay: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Replay this trace instead; goes with --model, --dtype and --mesh only."""

    def run(self) -> None:
        """Trace, write, print; or replay."""
        if self.replay is None:
            self._trace()
        elif dataclasses.replace(self, model="", dtype="", mesh=None, replay=None) != Trace("", ""):
            raise ValueError(
                "--replay goes with --model, --dtype and --mesh only: the trace has the rest"
            )
        else:
            self._replay(self.replay)

    def _trace(self) -> None:
        from inertiakv_jax import diagnostics

        policies = self._policies()
        given = self.prompt_file and _read("--prompt-file", self.prompt_file)
        continuation = self.continuation_file and _read(
            "--continuation-file", self.continuation_file
        )
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise ValueError(f"--prompt-tokens must be at least 1, got {self.prompt_tokens}")
        make_folder(self.out)
        for name in (TRACE, KEPT_SETS, KEPT_OVER_STEPS, BOUNDARY):
            check_output("--out", self.out / name)
        log, lm = console(), self._load()
        with _progress(log, f"{len(policies)} policies") as on_progress:
            trace = diagnostics.trace(
                lm,
                self._prompt(lm, given),
                policies,
                steps=self.steps,
                continuation=continuation,
                on_progress=on_progress,
            )
        self._write(trace, lm)
        out = output_console()
        out.print(trace_table(trace))
        out.print(f"\n{LEGEND}")
        out.print(f"\nTrace and pictures: {self.out}", soft_wrap=True)

    def _policies(self) -> "list[Policy]":
        from inertiakv_jax.diagnostics import without_ema

        policies = [_named(text, self.ratio) for text in self.policy or DEFAULT_POLICIES]
        counterparts = [] if self.ema_only else map(without_ema, policies)
        return [*policies, *(policy for policy in counterparts if policy is not None)]

    def _prompt(self, lm: "LanguageModel", given: str | None) -> list[int]:
        from inertiakv_jax.prose import planted_text

        def encode(text: str) -> list[int]:
            return lm.tokenizer(text)["input_ids"]

        if given is not None:
            return encode(given)[: self.prompt_tokens]
        length = self.prompt_tokens or PROSE_TOKENS
        return encode(planted_text(length, self.seed, lambda text: len(encode(text))).text)

    def _write(self, trace: "diagnostics.Trace", lm: "LanguageModel") -> None:
        from inertiakv_jax.diagnostics import figures, to_json

        texts = [lm.tokenizer.decode([token]) for token in trace.prompt + trace.continuation]
        write_file(self.out / TRACE, to_json(trace).encode())
        write_file(self.out / KEPT_SETS, figures.kept_sets(trace))
        write_file(self.out / KEPT_OVER_STEPS, figures.kept_over_steps(trace))
        write_file(self.out / BOUNDARY, figures.boundary(trace, texts))

    def _replay(self, path: Path) -> None:
        from inertiakv_jax import diagnostics

        trace = diagnostics.read_trace(path)
        log, lm = console(), self._load()
        with _progress(log, f"{len(trace.runs)} runs") as on_progress:
            replayed = diagnostics.replay(lm, trace, on_progress=on_progress)
        output_console().print(replay_table(replayed))

    def _load(self) -> "LanguageModel":
        from inertiakv_jax.sharding import make_mesh
        from inertiakv_jax.weights.load import load

        mesh = None if self.mesh is None else make_mesh(self.mesh)
        console().print(f"Loading {self.model}")
        return load(self.model, dtype=self.dtype, mesh=mesh)


def _named(text: str, ratio: float | None) -> "Policy":
    from inertiakv_jax.policies import as_written

    try:
        return as_written(text, ratio)
    except ValueError as error:
        raise ValueError(f"--policy {text}: {error}") from error


def _read(option: str, path: Path) -> str:
    if str(path) == STDIN:
        return read_prompt(STDIN, None)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is not valid UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{option} {path} is empty")
    return text


@contextlib.contextmanager
def _progress(log: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of steps with the time left on a terminal, one line elsewhere."""
    if not log.is_terminal:
        log.print(f"Taking the steps of {what}")
        yield lambda done, total: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def trace_table(trace: "diagnostics.Trace") -> Table:
    """One row a policy: tokens kept, Jaccard with the first, and means of the measures."""
    from inertiakv_jax.demo import one_line
    from inertiakv_jax.diagnostics.measures import mean

    table = plain_table(header_style="bold")
    table.add_column("policy")
    for heading in ("kept", "Jaccard", *COLUMNS.values(), "as full"):
        table.add_column(heading, justify="right")
    first, steps = trace.runs[0], len(trace.continuation)
    for run in trace.runs:
        jaccard = trace.kept_jaccard.get((first.name, run.name))
        table.add_row(
            one_line(run.name),
            f"{run.kept(steps).sum(axis=-1).mean():,.0f}",
            "" if jaccard is None else f"{mean(jaccard):.2f}",
            *(f"{mean(run.measures[key]):.2f}" if run.measures else "" for key in COLUMNS),
            f"{(run.chosen == trace.full_chosen).mean():.0%}",
        )
    return table


def replay_table(replayed: Sequence["diagnostics.Replayed"]) -> Table:
    """One row a run: steps whose token is the trace's, and how far its logit is off."""
    from inertiakv_jax.demo import one_line

    table = plain_table(header_style="bold")
    table.add_column("policy")
    for heading in ("same tokens", "logit difference"):
        table.add_column(heading, justify="right")
    for run in replayed:
        difference = f"{run.logit_difference:.1g}" if run.logit_difference else "0"
        table.add_row(one_line(run.name), f"{run.same_tokens}/{len(run.chosen)}", difference)
    return table
