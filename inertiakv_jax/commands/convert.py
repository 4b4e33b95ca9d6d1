"""``inertiakv convert``: one model in another format."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from inertiakv_jax.commands.terminal import console, progress

DESCRIPTION = """Write a model in another format.

As an orbax checkpoint, or as a folder that transformers loads. An orbax checkpoint is restored
straight onto the devices of a mesh, and can hold int8 weights.
The result is loaded like any other: inertiakv generate "..." --model TARGET

Examples:
  inertiakv convert smollm2-135m checkpoints/smollm2
  inertiakv convert meta-llama/Llama-3.1-8B-Instruct llama-int8 --quantize int8
  inertiakv convert model.gguf model-folder --format safetensors --dtype float32
"""


@dataclasses.dataclass(frozen=True)
class Convert:
    """Options of ``inertiakv convert``."""

    source: Positional[str]
    """Catalogue name, hub id, folder or .gguf file."""
    target: Positional[Path]
    """Folder to write; it must not exist, or be empty."""
    format: Literal["orbax", "safetensors"] = "orbax"
    """orbax: for this library. safetensors: for transformers, too."""
    dtype: str = "bfloat16"
    """bfloat16 or float32, of the weights that are written."""
    quantize: Annotated[str | None, arg(metavar="{int8}", help_behavior_hint="")] = None
    """int8: matrices of attention and MLPs with one scale per output; orbax only."""

    def run(self) -> None:
        """Load, write, and say what was written."""
        from inertiakv_jax.weights.hf_export import check_new_folder

        if self.quantize is not None and self.format != "orbax":
            raise ValueError("--quantize needs --format orbax: transformers cannot read the result")
        check_new_folder(self.target)
        save = self._writer()
        from inertiakv_jax.weights.load import load

        log = console()
        with progress(log) as tell:
            tell(f"Loading {self.source}")
            lm = load(self.source, dtype=self.dtype, quantize=self.quantize)
            tell(f"Writing {self.target}")
            save(lm, self.target)
        size = sum(file.stat().st_size for file in self.target.rglob("*") if file.is_file())
        log.print(f"{self.target}: {lm.config.family}, {size / 1e6:,.0f} MB, {self.format}")

    def _writer(self):
        """The function that writes; asked for before anything long is done."""
        if self.format == "safetensors":
            from inertiakv_jax.weights.hf_export import save_safetensors

            return save_safetensors
        from inertiakv_jax import checkpoint

        checkpoint.check_orbax()
        return checkpoint.save
