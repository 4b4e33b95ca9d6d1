"""``inertiakv knobs``: memory over steps against weights over layers, on questions about a fact."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import arg

from inertiakv_jax.commands.terminal import (
    check_output,
    console,
    is_tenth,
    output_console,
    plain_table,
    write_file,
)
from inertiakv_jax.files import make_folder

DESCRIPTION = """Measure memory over steps against weights over layers.

Which of these knobs of the aggregation matters? Asks for one fact in a long text, with every
combination of both knobs, and with one ranking a layer and one a kv head. Writes knobs.json and
knobs.png, and prints the table.

Examples:
  inertiakv knobs
  inertiakv knobs --model qwen.gguf --task multikey --data-dir data --texts 8
"""


@dataclasses.dataclass(frozen=True)
class Knobs:
    """What to ask, and of whom."""

    model: str = "smollm2-135m"
    """Catalogue name, hub id, folder or .gguf file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation."""
    task: Literal["planted", "multikey"] = "planted"
    """A number planted in made-up prose, or RULER's niah_multikey_1 (needs its essays)."""
    data_dir: Path | None = None
    """Folder with ruler/PaulGrahamEssays.json; without it, the hub."""
    texts: Annotated[int, arg(metavar="N")] = 20
    """Texts to ask about."""
    tokens: Annotated[int, arg(metavar="N")] = 1000
    """Length of a text."""
    ratio: Annotated[float, arg(metavar="R")] = 0.9
    """Fraction of the prompt removed."""
    out: Path = Path("inertiakv_knobs")
    """Folder for the results."""

    def run(self) -> None:
        """Measure, write, print."""
        from inertiakv_jax.eval import knobs
        from inertiakv_jax.eval.sources import Sources
        from inertiakv_jax.policies import inertiakv
        from inertiakv_jax.weights.load import load

        if self.texts < 1 or self.tokens < 100:
            raise ValueError(
                f"expected at least 1 text of 100 tokens, got {self.texts} of {self.tokens}"
            )
        inertiakv(self.ratio)  # refuses a bad ratio before anything is loaded
        paths = [self.out / name for name in ("knobs.json", "knobs.png")]
        make_folder(self.out)
        for path in paths:
            check_output("--out", path)
        log = console()
        log.print(f"Loading {self.model}")
        lm = load(self.model, dtype=self.dtype)
        if self.task == "planted":
            questions = knobs.planted_questions(lm, self.texts, self.tokens)
        else:
            questions = knobs.multikey_questions(
                lm, self.texts, self.tokens, Sources(self.data_dir)
            )
        with _progress(log) as on_progress:
            right = knobs.measure(lm, questions, self.ratio, on_progress)
        description = {
            key: value if value is None or isinstance(value, int | float) else str(value)
            for key, value in dataclasses.asdict(self).items()
            if key != "out"
        }
        write_file(paths[0], (json.dumps({**description, "right": right}) + "\n").encode())
        title = f"{Path(self.model).stem}, {self.task}, {self.ratio:.0%} removed: percent right"
        write_file(paths[1], knobs.draw(title, right))
        shown = plain_table(title=title)
        for heading in ("decay", *(f"{decay:g}" for decay in knobs.DECAYS)):
            shown.add_column(heading, justify="left" if heading == "decay" else "right")
        for label, percents in knobs.table(right):
            shown.add_row(label, *map(str, percents))
        output_console().print(shown)


@contextlib.contextmanager
def _progress(log: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar of answers on a terminal; elsewhere a line for the first and each tenth of them."""
    if not log.is_terminal:

        def print_line(done: int, total: int) -> None:
            if done == 1 or is_tenth(done, total):
                log.print(f"{done} of {total} answers")

        log.print("Compiling and asking")
        yield print_line
        return
    columns = (TextColumn("Asking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
