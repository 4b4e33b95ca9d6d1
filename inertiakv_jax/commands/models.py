"""``inertiakv models``: the models that are known by name."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from inertiakv_jax.commands.terminal import output_console, plain_table

if TYPE_CHECKING:  # not needed for --help
    from inertiakv_jax.weights.catalogue import CatalogueEntry

DESCRIPTION = """List the models that can be loaded by name.

KV/token is what one more token adds to the full cache, in bfloat16, over the layers that attend to
all tokens; windows is what the layers with a sliding window hold on top, however long the text.

Examples:
  inertiakv models
  inertiakv models --family gemma3_text
  inertiakv models llama-3.1-8b --json
"""
BFLOAT16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Models:
    """Options of ``inertiakv models``."""

    name: Positional[str] = ""
    """One model; all without it."""
    family: str = ""
    """Only those of this model_type."""
    json: bool = False
    """Print a JSON list instead."""

    def run(self) -> None:
        """Print the list."""
        from inertiakv_jax.config import FAMILIES
        from inertiakv_jax.weights.catalogue import CATALOGUE

        if self.name and self.name not in CATALOGUE:
            raise ValueError(f"model {self.name!r} is not one of {', '.join(CATALOGUE)}")
        if self.family and self.family not in FAMILIES:
            raise ValueError(f"--family {self.family!r} is not one of {', '.join(FAMILIES)}")
        rows = [
            _row(name, CATALOGUE[name])
            for name in ([self.name] if self.name else CATALOGUE)
            if self.family in ("", CATALOGUE[name].config.family)
        ]
        rows.sort(key=lambda row: (row["family"], row["parameters"], row["name"]))
        if self.json:
            sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        else:
            _print(rows)


def _row(name: str, entry: "CatalogueEntry") -> dict[str, Any]:
    config = entry.config
    experts = config.experts
    return {
        "name": name,
        "hub_id": entry.hub_id,
        "family": config.family,
        "licence": entry.licence,
        "parameters": entry.num_parameters,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "experts": None if experts is None else [experts.num_per_token, experts.num_experts],
        "context": config.max_position_embeddings,
        "kv_bytes_per_token": config.kv_bytes_per_token(BFLOAT16_BYTES),
        "window_kv_bytes": config.window_kv_bytes(BFLOAT16_BYTES),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = plain_table()
    table.add_column("name", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for column in ("params", "layers", "heads", "context", "KV/token", "windows"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("hub id", overflow="fold")  # the one to give way on a narrow terminal
    for row in rows:
        table.add_row(
            row["name"],
            row["family"],
            _count(row["parameters"]),
            str(row["layers"]),
            f"{row['query_heads']}/{row['kv_heads']} x {row['head_dim']}",
            f"{row['context']:,}",
            _bytes(row["kv_bytes_per_token"]),
            _bytes(row["window_kv_bytes"]),
            row["hub_id"],
        )
    output_console().print(table)


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 999_500_000 else f"{number / 1e6:.0f} M"


def _bytes(number: int) -> str:
    if number == 0:
        return "-"
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"
