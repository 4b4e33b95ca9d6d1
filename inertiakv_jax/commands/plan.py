"""``inertiakv plan``: what a run takes on accelerators that need not be there."""

import dataclasses
import json
import sys
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from inertiakv_jax.commands.terminal import console, progress

DESCRIPTION = """Plan a run on TPUs or NVIDIA GPUs without one.

Does it fit, and how fast can it be? Compiles prefill, step 1 and a later step for the real chip and
prints the bytes on each device, what devices exchange, and the roofline of decoding with the full
cache and with the policy. Weights and caches are exact; temporaries and collectives are carried
over from few layers.

Needs the extra 'aot': pip install 'inertiakv-jax[aot]'.

Examples:
  inertiakv plan llama-3.1-8b --topology v5e:2x4 --batch 8 --context 65536 --ratio 0.9
  inertiakv plan llama-3.3-70b --topology h100:8 --mesh model=8 --policy lazy4
  inertiakv plan llama-3.3-70b --search --topology v5p,v6e --json
"""
_NONE_SHOWN = arg(help_behavior_hint="")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Options of ``inertiakv plan``."""

    model: Positional[str] = "llama-3.1-8b"
    """Catalogue name, hub id, folder with config.json, or .gguf file; no weights are read."""
    topology: Annotated[str, _NONE_SHOWN] = ""
    """Chips and how they are joined: v5e:2x4, v5p:2x2x4, v6e:8x8, a100:4, h100:8, ... With --search
    the chips to choose from, separated by commas; all without it."""
    mesh: Annotated[
        str, arg(metavar="data=D,model=M", help_behavior_hint="(default: the best)")
    ] = ""
    """How the devices share the work: rows over data, heads over model; experts over expert, and
    the slots of the full cache over context."""
    search: bool = False
    """Find the smallest topology that fits, and its best mesh."""
    whole: bool = False
    """Compile all layers, where few are enough to tell: minutes more."""

    batch: int = 8
    """Rows."""
    context: int = 65536
    """Tokens of a row at the end, prompt and new ones."""
    new_tokens: int = 128
    """How many of them are decoded."""
    policy: str = "inertiakv"
    """As of `inertiakv generate`."""
    ratio: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.9)")] = None
    """Fraction of the prompt's cache removed, in [0, 1)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights and the computation."""
    quantize: Annotated[Literal["int8"] | None, _NONE_SHOWN] = None
    """Keep the weights of all layers as int8."""
    json: bool = False
    """Print one JSON object instead."""

    def run(self) -> None:
        """Plan and print."""
        from inertiakv_jax.commands import plan_report
        from inertiakv_jax.plan import topology
        from inertiakv_jax.plan.child import run_plan
        from inertiakv_jax.plan.request import Request

        # What is misspelt is refused before a process is started.
        if self.search:
            topology.parse_chips(self.topology)
        else:
            parsed = topology.parse_topology(self.topology)
            if self.mesh:
                topology.parse_mesh(self.mesh, parsed)
        names = [field.name for field in dataclasses.fields(Request)]
        with progress(console()) as say:
            plan = run_plan(Request(**{name: getattr(self, name) for name in names}), say)
        if self.json:
            sys.stdout.write(json.dumps(plan, indent=2) + "\n")
        else:
            plan_report.print_plan(plan)
