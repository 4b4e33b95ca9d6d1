"""``inertiakv demo``: one long text, one question, four ways to keep the cache."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from inertiakv_jax.commands.terminal import (
    check_output,
    console,
    output_console,
    plain_table,
    progress,
    write_file,
)

if TYPE_CHECKING:  # heavy, and not needed for --help
    from inertiakv_jax.demo import Answer

DESCRIPTION = """Find a number in a long text with a tenth of the cache.

Three policies and the full cache are asked for it. Prints what each policy answered, kept and took,
and draws which tokens it kept.

Example:
  inertiakv demo --tokens 2000 --seed 1
"""
RATIO = 0.9


@dataclasses.dataclass(frozen=True)
class Demo:
    """Options of ``inertiakv demo``."""

    model: str = "smollm2-135m"
    """Catalogue name, hub id, folder with config.json, or .gguf file."""
    output: Path = Path("inertiakv_demo.png")
    """Where the picture goes."""
    tokens: int = 1000
    """About how many tokens the text has."""
    seed: int = 0
    """Of the text: its sentences, the number and where it stands."""

    def run(self) -> None:
        """Answer, print the table, write the picture."""
        check_output("--output", self.output)
        if self.tokens < 1:
            raise ValueError(f"--tokens must be at least 1, got {self.tokens}")
        log = console()
        log.print(f"Loading {self.model}")
        from inertiakv_jax import demo, demo_figure, policies, prose
        from inertiakv_jax.commands.bench_report import busy_cpus, warn_if_busy
        from inertiakv_jax.weights.load import load

        busy = busy_cpus()
        lm = load(self.model)
        planted = prose.planted_text(
            self.tokens, self.seed, lambda text: len(lm.tokenizer(text)["input_ids"])
        )
        question = demo.pose(lm, planted)
        log.print(
            f"A text of {self.tokens:,} tokens gives a number for “{planted.topic}”, "
            f"{planted.number}, and the model is asked for it."
        )
        contestants = [
            policies.full(),
            policies.inertiakv(RATIO),
            policies.lazy(4, RATIO),
            policies.score_free(RATIO),
        ]
        with progress(log) as say:
            answers = demo.compare(lm, question, contestants, say)
        name = Path(self.model).name
        title = (
            f"Tokens that each policy keeps while {name} answers: all, or {1 - RATIO:.0%} of them"
        )
        write_file(self.output, demo_figure.draw(question, answers, title))
        out = output_console()
        out.print(answer_table(answers))
        warn_if_busy(out, busy)
        out.print(f"\nWhich tokens each policy kept: {self.output}", soft_wrap=True)


def answer_table(answers: Sequence["Answer"]) -> Table:
    """One row a policy: answer, right or wrong, tokens kept, KV MiB, decode tokens/s."""
    from inertiakv_jax import demo

    table = plain_table(header_style="bold")
    table.add_column("policy")
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("")
    for heading in ("tokens kept", "KV MiB", "decode tokens/s"):
        table.add_column(heading, justify="right")
    for answer in answers:
        table.add_row(
            answer.policy.name,
            demo.one_line(answer.text) or "(nothing)",
            Text("right", "green") if answer.right else Text("wrong", "red"),
            f"{answer.kept_tokens:,}",
            f"{answer.kv_bytes / 2**20:.1f}",
            f"{answer.decode_tokens_per_s:.1f}",
        )
    return table
