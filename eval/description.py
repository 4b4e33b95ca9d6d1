"""What a run is, as stored before its first result and compared when it is resumed."""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from inertiakv_jax.eval.settings import Settings
from inertiakv_jax.eval.tasks.task import Example, Task
from inertiakv_jax.language_model import LanguageModel

FORMAT = 1
_LIBRARIES = ("inertiakv-jax", "jax", "jaxlib", "flax", "transformers", "rouge", "jieba")


def description(
    settings: Settings, lm: LanguageModel, examples: dict[Task, list[Example]]
) -> dict[str, Any]:
    """What run.json says: settings, model, checksums of the examples, versions and device."""
    groups: dict[str, list[Example]] = {}
    for found in examples.values():
        for example in found:
            groups.setdefault(example.group, []).append(example)
    config = json.loads(json.dumps(dataclasses.asdict(lm.config), default=str))
    device = jax.devices()[0]
    return {
        "format": FORMAT,
        "settings": settings.identity(),
        "model": {"dtype": str(lm.model.dtype), "config": config},
        "examples": {
            group: {"count": len(found), "sha256": checksum(found)}
            for group, found in groups.items()
        },
        "versions": {"python": platform.python_version()} | dict(_versions()),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.local_device_count(),  # whatever the number of hosts
        },
        "report": {"name": settings.name, "paper": list(settings.paper)},
    }


def checksum(examples: Sequence[Example]) -> str:
    """SHA-256 of examples as they are asked: prompts, answers, lengths and all."""
    digest = hashlib.sha256()
    for example in examples:
        fields = dataclasses.asdict(example)
        digest.update(json.dumps(fields, sort_keys=True, ensure_ascii=False).encode())
    return digest.hexdigest()


def _versions() -> Iterator[tuple[str, str]]:
    for library in _LIBRARIES:
        try:
            yield library, importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
