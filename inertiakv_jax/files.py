"""Files of users: YAML that is read, and folders for what is written."""

import os
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError


class _OneOfEachKey(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys, where YAML allows one; this says which it is."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key)
            if name in seen:
                raise ComposerError(None, None, f"the key {name!r} is there twice", key.start_mark)
            seen.add(name)
        return node


def parse_yaml(text: str) -> Any:
    """Plain data of a YAML document; all YAML of the project is read here.

    Raises:
      yaml.YAMLError: it is none, has tags that make objects, or a mapping has a key twice.
    """
    loader = _OneOfEachKey(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def check_folder(path: Path) -> None:
    """Raise ValueError unless ``path`` is a folder to write to, or can be made one."""
    places = (path, *path.parents)  # up to the root, or to "."
    existing = next((place for place in places if os.path.lexists(place)), Path("."))
    if not existing.is_dir():
        what = "it" if existing == path else str(existing)
        raise ValueError(f"the folder {path} cannot be made: {what} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"the folder {path} cannot be written to: {existing} is not writable")


def make_folder(path: Path) -> None:
    """Make a folder to write to, and those above it, where they are missing.

    Raises:
      ValueError: it cannot be made, or not be written to.
    """
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {path} cannot be made: {error.strerror}") from error
