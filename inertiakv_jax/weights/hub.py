"""Checkpoints from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from inertiakv_jax.weights.hf_config import config_from_hf
from inertiakv_jax.weights.safetensors_files import read_json

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors.index.json",
)
WEIGHT_FILES = ("*.safetensors",)
# Second copies of the weights: in another layout beside, or in subfolders.
NOT_WANTED = ("consolidated*", "*/*")


def download_config(hub_id: str, revision: str | None = None) -> Path:
    """Fetch all of a repository but its weights; as ``download`` otherwise."""
    folder = _snapshot(hub_id, revision, SMALL_FILES)
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{hub_id} has no config.json: not a model for transformers")
    config_from_hf(read_json(config))
    return folder


def download(hub_id: str, revision: str | None = None) -> Path:
    """Fetch a repository's config, tokenizer and safetensors into the hub's own cache.

    The config is read first: a model that is not supported costs no download of its weights.

    Args:
        hub_id: "organisation/name".
        revision: branch, tag or commit; None is the main branch.

    Returns:
        The folder with the files.

    Raises:
        ValueError: no such repository, no access to it, or a model that is not supported.
        ConnectionError: it is neither cached nor within reach.
    """
    download_config(hub_id, revision)
    return _snapshot(hub_id, revision, SMALL_FILES + WEIGHT_FILES)


def _snapshot(hub_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(NOT_WANTED),
            )
        )
    except GatedRepoError as error:
        raise ValueError(
            f"{hub_id} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{hub_id} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{hub_id} is not a public repository of the hub") from error
    except HFValidationError as error:
        raise ValueError(f"{hub_id!r} is not a hub id: {error}") from error
    except Exception as error:  # the HTTP library's own errors differ between hub versions
        raise ConnectionError(f"cannot download {hub_id} from the hub: {error}") from error
