"""What is asked of ``inertiakv plan``, as it goes to the process that compiles."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Request:
    """Only texts and numbers: it travels as JSON.

    Attributes:
      model: catalogue name, hub id, folder with config.json, or .gguf file.
      dtype: "bfloat16" or "float32".
      quantize: "int8" or None.
      topology: as ``topology.parse_topology`` reads it; of a search the chips to choose from.
      mesh: as ``topology.parse_mesh`` reads it; empty takes the best.
      batch: rows.
      context: tokens of a row, prompt and new ones.
      new_tokens: how many of them are decoded.
      policy: as ``policies.by_name`` reads it.
      ratio: fraction of the prompt removed; None: the policy's.
      search: find the topology.
      whole: compile programs of all layers.
    """

    model: str
    dtype: str
    quantize: str | None
    topology: str
    mesh: str
    batch: int
    context: int
    new_tokens: int
    policy: str
    ratio: float | None
    search: bool
    whole: bool
