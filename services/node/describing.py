"""A model of which only the config is here: its tensors as transformers would make them, without values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshnet.errors import BadFiles
from meshnet.model import ModelManifest, check_model_id
from services.node.engine.config import make_config
from services.node.engine.structure import find_structure
from services.node.files.description import Description
from services.node.files.manifest import manifest_of
from services.node.files.safetensors_header import SINGLE_FILE, TensorHeader
from services.node.files.support import check_supported


def describe_config(model_id: str, path: Path) -> ModelManifest:
    """What the model would be with weights. Raises LoadFailed, with the reason, if it could not be served."""
    config = _read(path)
    check_supported(config)
    state = find_structure(make_config(config)).model.state_dict()
    tensors = {
        name: TensorHeader("BF16", tuple(tensor.shape), SINGLE_FILE, 0, 2 * tensor.numel())
        for name, tensor in state.items()
    }
    sizes = {SINGLE_FILE: sum(tensor.num_bytes for tensor in tensors.values())}
    return manifest_of(check_model_id(model_id), Description(config, sizes, tensors, dict.fromkeys(tensors, "")))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise BadFiles(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadFiles(f"{path.name} is not valid JSON") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadFiles(f"{path.name} is not the config of a model: it names no model_type")
    return config
