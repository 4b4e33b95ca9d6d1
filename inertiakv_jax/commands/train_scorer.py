"""``inertiakv train-scorer``: distil the attention scorer into one that needs no attention."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tyro.conf import arg

from inertiakv_jax.commands.terminal import (
    check_output,
    console,
    is_tenth,
    output_console,
    plain_table,
    write_file,
)
from inertiakv_jax.files import check_folder

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax.training.scorer import Trained

DESCRIPTION = """Train the learned scorer of a model, by distillation.

It learns from the model's own attention, on any text. The model stays as it is; the scorer, one
small file, is for the policy 'learned'. It is judged on the text's last tenth, which it is not
trained on. The same command goes on where it was stopped.

Needs the extra 'train': pip install 'inertiakv-jax[train]'.

Examples:
  inertiakv train-scorer --text essays.txt --output scorer.safetensors
  inertiakv train-scorer --dataset Salesforce/wikitext --configuration wikitext-103-raw-v1
"""

_NONE_SHOWN = arg(help_behavior_hint="")


@dataclasses.dataclass(frozen=True)
class TrainScorer:
    """Options of ``inertiakv train-scorer``."""

    text: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Text file to train on."""
    dataset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Data set to train on instead: a hub id or a folder; needs the package datasets."""
    configuration: Annotated[str | None, _NONE_SHOWN] = None
    """Of the data set, if it has several."""
    split: str = "train"
    """Of the data set."""
    column: str = "text"
    """Of the data set: the one with the text."""
    model: str = "smollm2-135m"
    """Catalogue name, hub id, folder with config.json, or .gguf file."""
    dtype: str = "float32"
    """float32 or bfloat16."""

    output: Path = Path("scorer.safetensors")
    """Where the scorer goes."""
    json: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Also write what was measured, and the loss of every step, to this file."""
    checkpoints: Annotated[
        Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: OUTPUT.checkpoints)")
    ] = None
    """Folder of this run's checkpoints, which it goes on from."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""

    steps: int = 200
    """Updates of the weights."""
    batch_size: int = 1
    """Texts of each step."""
    context: int = 512
    """Tokens of a text, a multiple of 64, at least 128."""
    queries: int = 16
    """Queries of each text, drawn at random; each is taken in every layer."""
    learning_rate: float = 3e-3
    """Of Adam at the first step; falls to 0 along a cosine."""
    held_out: int = 8
    """Texts that the scorer is judged by, at most."""
    seed: int = 0
    """Of the first weights, the order of texts and the queries."""

    def run(self) -> None:
        """Train, write the scorer, print how well it ranks held-out text."""
        check_output("--output", self.output)
        if self.json is not None:
            check_output("--json", self.json)
            if self.json.resolve() == self.output.resolve():
                raise ValueError(f"--json and --output must differ, got {self.output} for both")
        checkpoints = self.checkpoints or self.output.with_name(self.output.name + ".checkpoints")
        check_folder(checkpoints)
        training = _training()
        names = [field.name for field in dataclasses.fields(training.Settings)]
        settings = training.Settings(**{name: getattr(self, name) for name in names})
        text = self._read_text()
        log = console()
        log.print(f"Loading {self.model}")
        from inertiakv_jax.learned_scorer import save_learned
        from inertiakv_jax.weights.load import load

        lm = load(self.model, dtype=self.dtype)
        with _progress(log, self.steps) as on_step:
            trained = training.train(
                lm,
                text,
                settings,
                checkpoints=checkpoints,
                checkpoint_every=self.checkpoint_every,
                on_step=on_step,
            )
        save_learned(str(self.output), trained.weights)
        if self.json is not None:
            measured = {"model": lm.name, "settings": dataclasses.asdict(settings)}
            measured |= {k: v for k, v in dataclasses.asdict(trained).items() if k != "weights"}
            write_file(self.json, (json.dumps(measured, indent=2) + "\n").encode())
        if trained.resumed_at:
            log.print(f"Went on from the checkpoint of step {trained.resumed_at}")
        out = output_console()
        out.print(agreement_table(trained))
        out.print(f"\nScorer: {self.output}", soft_wrap=True)

    def _read_text(self) -> str:
        from inertiakv_jax.training import text as training_text

        if (self.text is None) == (self.dataset is None):
            raise ValueError("say what to train on: --text PATH or --dataset NAME, one of them")
        if self.text is not None:
            return training_text.read_text(self.text)
        assert self.dataset is not None
        return training_text.read_dataset(self.dataset, self.configuration, self.split, self.column)


def agreement_table(trained: "Trained") -> Table:
    """Held-out loss and agreement with attention, before and after."""
    table = plain_table(header_style="bold")
    table.add_column("on held-out text")
    for heading in (
        *("loss", "Spearman", "Jaccard of top 10%"),
        *("of one ranking: Spearman", "Jaccard"),
    ):
        table.add_column(heading, justify="right")
    for name, agreement in (("untrained", trained.before), ("trained", trained.after)):
        table.add_row(name, *(f"{value:.3f}" for value in dataclasses.astuple(agreement)))
    return table


def _training() -> ModuleType:
    try:
        from inertiakv_jax.training import scorer as scorer_training
    except ImportError as error:  # says which extra to install
        raise ValueError(str(error)) from error
    return scorer_training


@contextlib.contextmanager
def _progress(log: Console, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar with the loss on a terminal; elsewhere a line every tenth of the way."""
    if not log.is_terminal:

        def print_line(step: int, loss: float) -> None:
            if is_tenth(step, steps):
                log.print(f"step {step} of {steps}: loss {loss:.4f}")

        yield print_line
        return
    columns = (
        TextColumn("Training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, console=log) as bar:
        task = bar.add_task("", total=steps, loss="-")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"{loss:.4f}")
