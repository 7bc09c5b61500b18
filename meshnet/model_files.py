"""Where this machine keeps weight files: model ids to directories and GGUF files.

Only the command line and the environment of a process name paths; messages name model ids, never paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshnet.errors import InvalidRequest
from meshnet.model import check_model_id

CONFIG_FILE = "config.json"
GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is a Hugging Face directory (with config.json), or one GGUF file."""

    model_id: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == GGUF_SUFFIX


def locate_models(arguments: Iterable[str], models_dir: Path | None = None) -> dict[str, ModelFiles]:
    """Models by id, from `ID=PATH` or `PATH` arguments and from a folder of models.

    Without an ID the file or directory name is the id. Raises InvalidRequest for what is not there or is no model.
    """
    found = [_parse(argument) for argument in arguments]
    if models_dir is not None:
        if not models_dir.is_dir():
            raise InvalidRequest(f"models folder {str(models_dir)!r} does not exist")
        found += [ModelFiles(_default_id(path), path) for path in sorted(models_dir.iterdir()) if _is_model(path)]
    models: dict[str, ModelFiles] = {}
    for files in found:
        if models.setdefault(files.model_id, files).path != files.path:
            raise InvalidRequest(
                f"model id {files.model_id!r} is given to {str(models[files.model_id].path)!r} and "
                f"to {str(files.path)!r}; name one of them with ID=PATH"
            )
    return models


def _parse(argument: str) -> ModelFiles:
    name, equals, text = argument.partition("=")
    if not equals:
        name, text = "", argument
    path = Path(text).expanduser().resolve()
    if not path.exists():
        raise InvalidRequest(f"model {argument!r}: {str(path)!r} does not exist")
    if not _is_model(path):
        raise InvalidRequest(
            f"model {argument!r}: {str(path)!r} is neither a directory with a {CONFIG_FILE} nor a {GGUF_SUFFIX} file"
        )
    return ModelFiles(check_model_id(name or _default_id(path)), path)


def _is_model(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() if path.is_dir() else path.suffix == GGUF_SUFFIX


def _default_id(path: Path) -> str:
    name = path.name.removesuffix(GGUF_SUFFIX)
    return check_model_id(re.sub(r"[^A-Za-z0-9._-]+", "-", name).lower())
