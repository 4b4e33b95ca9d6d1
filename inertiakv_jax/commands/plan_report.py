"""The tables of ``inertiakv plan``."""

from typing import Any

from rich.table import Table

from inertiakv_jax.commands.terminal import output_console, plain_table
from inertiakv_jax.plan.topology import MeshShape

GIB = 1 << 30


def print_plan(plan: dict[str, Any]) -> None:
    """Print a plan of ``planning.make_plan``."""
    out = output_console()
    out.print(_headline(plan), soft_wrap=True)
    for table in (_search(plan), _memory(plan), _collectives(plan), _roofline(plan)):
        if table is not None:
            out.print()
            out.print(table)
    out.print()
    for note in _notes(plan):
        out.print(note, soft_wrap=True)


def _headline(plan: dict[str, Any]) -> str:
    ratio = "" if plan["ratio"] is None else f" at ratio {plan['ratio']:g}"
    verdict = "fits" if plan["fits"] else "does not fit"
    return (
        f"{plan['model']}, {plan['quantize'] or plan['dtype']}, on {plan['topology']}, mesh "
        f"{_mesh(plan['mesh'])}: {plan['batch']} rows of {plan['context']:,} tokens, "
        f"{plan['policy']}{ratio}: {verdict}"
    )


def _search(plan: dict[str, Any]) -> Table | None:
    if not plan["search"]:
        return None
    table = _table("smallest that fits", "mesh", "GiB a device", "of", "tokens/s at most")
    for one in plan["search"]:
        table.add_row(
            one["topology"],
            _mesh(one["mesh"]),
            _gib(one["peak_bytes"]),
            _gib(one["usable_bytes"]),
            f"{one['tokens_per_second']:,.0f}",
        )
    return table


def _memory(plan: dict[str, Any]) -> Table:
    columns = ("weights", "full cache", "kept cache", "temporaries")
    table = _table("GiB a device", *columns, "total", f"of {_gib(plan['usable_bytes'])}")
    for phase in plan["phases"]:
        parts = [phase[column.replace(" ", "_")] for column in columns]
        share = phase["total"] / plan["usable_bytes"]
        table.add_row(
            phase["name"],
            *(_gib(part) if part else "-" for part in parts),
            _gib(phase["total"]),
            f"{share:.0%}" + ("" if phase["fits"] else " too much"),
        )
    return table


def _collectives(plan: dict[str, Any]) -> Table:
    table = _table("collectives", "kind", "number", "MiB a device")
    for phase in plan["phases"]:
        name = "prefill, each chunk" if phase["name"] == "prefill" else phase["name"]
        for kind, exchange in phase["collectives"].items():
            table.add_row(name, kind, str(exchange["count"]), f"{exchange['bytes'] / 2**20:.2f}")
            name = ""
        if not phase["collectives"]:
            table.add_row(name, "none", "-", "-")
    return table


def _roofline(plan: dict[str, Any]) -> Table:
    table = _table("decode step at best", "full cache", f"{plan['policy']}")
    speeds = plan["roofline"]["full_cache"], plan["roofline"]["policy"]

    def row(name, show):
        table.add_row(name, *map(show, speeds))

    row("weights read, GiB a device", lambda one: _gib(one["weights_read"]))
    row("cache read, GiB a device", lambda one: _gib(one["cache_read"]))
    row("read, ms", lambda one: _ms(one["memory_seconds"]))
    row("multiply, ms (meanwhile)", lambda one: _ms(one["compute_seconds"]))
    row("exchange, ms", lambda one: _ms(one["exchange_seconds"]))
    row("step, ms", lambda one: _ms(one["seconds"]))
    row("tokens/s, all rows", lambda one: f"{one['tokens_per_second']:,.0f}")
    return table


def _notes(plan: dict[str, Any]) -> list[str]:
    layers = " and ".join(map(str, plan["compiled_layers"]))
    few = "" if plan["whole"] else ", carried over to all"
    notes = [
        f"Weights and caches are exact; temporaries and collectives are those of programs with "
        f"{layers} of the {plan['num_layers']} layers{few}. The best step is a bound, not a "
        "measurement."
    ]
    if plan["repeated"]:
        notes.append(plan["repeated"] + ".")
    if plan["padded_batch"] != plan["batch"]:
        notes.append(
            f"The mesh splits rows over {plan['mesh']['data']} devices, so the batch is padded "
            f"from {plan['batch']} to {plan['padded_batch']} rows."
        )
    if plan["prefill_method_compiled"] is False:
        notes.append("Thinning out the prompt after prefill is not compiled; its caches count.")
    return notes


def _table(first: str, *columns: str) -> Table:
    table = plain_table(header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    return table


def _mesh(mesh: dict[str, int]) -> str:
    return str(MeshShape(**mesh))


def _gib(number: float) -> str:
    return f"{number / GIB:,.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
