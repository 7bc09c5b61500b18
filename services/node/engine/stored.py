"""The weights of a model on this machine: its own files, or what was fetched of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshnet.model_files import ModelFiles
from services.node.engine.gguf_weights import GgufSource
from services.node.engine.weights import SafetensorsSource, WeightSource
from services.node.files.fetched import FetchedModel
from services.node.files.gguf_config import gguf_config
from services.node.files.gguf_header import open_gguf
from services.node.files.model_config import Config, read_config
from services.node.files.safetensors_header import read_directory


@dataclass(frozen=True, slots=True)
class Stored:
    """`source` takes the name of the base model within the model for causal LM, and the number of layers."""

    config: Config
    source: Callable[[str, int], WeightSource]


def open_files(files: ModelFiles) -> Stored:
    """All of a model. Raises LoadFailed if the files cannot be read, or the model cannot be run."""
    if files.is_gguf:
        reader = open_gguf(files)
        config = gguf_config(reader)
        return Stored(config, lambda _, num_layers: GgufSource(reader, config, num_layers))
    config, tensors = read_config(files), read_directory(files.path)
    return Stored(config, lambda base, _: SafetensorsSource(files.path, tensors, base))


def open_fetched(folder: Path) -> Stored:
    """What is there of a model: tensors that were not fetched are known, and refused when they are read, because the
    files have zeros in their place. Raises LoadFailed as `open_files` does."""
    model = FetchedModel.open(folder)
    config, tensors, present = model.description.config, model.description.tensors, frozenset(model.present)
    if model.description.is_gguf:
        reader = open_gguf(model.files(folder.parent.name))
        return Stored(config, lambda _, num_layers: GgufSource(reader, config, num_layers, present))
    return Stored(config, lambda base, _: SafetensorsSource(folder, tensors, base, present))
