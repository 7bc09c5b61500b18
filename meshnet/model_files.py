"""Where the weights of models are: directories and GGUF files of this machine, or a model hub.

Only the command line and the environment of a process name paths; messages name model ids, never paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshnet.errors import InvalidRequest
from meshnet.model import check_model_id

CONFIG_FILE = "config.json"
GGUF_SUFFIX = ".gguf"
HUB_PREFIX = "hf:"

_HUB_MODEL = re.compile(r"hf:([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@([\w./-]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is a Hugging Face directory (with config.json), or one GGUF file."""

    model_id: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == GGUF_SUFFIX


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of safetensors files on the Hugging Face hub. `revision` is a commit, a branch or a tag."""

    model_id: str
    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.repo}@{self.revision}"


def locate_models(arguments: Iterable[str], models_dir: Path | None = None) -> dict[str, ModelFiles | HubModel]:
    """Models by id, from `ID=PATH`, `PATH`, `ID=hf:ORG/NAME@REVISION` or `hf:ORG/NAME` arguments and from a folder of
    models.

    Without an ID the name of the file, directory or repository is the id. Raises InvalidRequest for what is not there
    or is no model.
    """
    found: list[ModelFiles | HubModel] = [_parse(argument) for argument in arguments]
    if models_dir is not None:
        if not models_dir.is_dir():
            raise InvalidRequest(f"models folder {str(models_dir)!r} does not exist")
        found += [ModelFiles(_default_id(path), path) for path in sorted(models_dir.iterdir()) if _is_model(path)]
    models: dict[str, ModelFiles | HubModel] = {}
    for files in found:
        if (other := models.setdefault(files.model_id, files)) != files:
            raise InvalidRequest(
                f"model id {files.model_id!r} is given to {_place(other)!r} and to {_place(files)!r}; "
                "name one of them with ID=PATH"
            )
    return models


def local_models(models: Mapping[str, ModelFiles | HubModel]) -> dict[str, ModelFiles]:
    """Those whose files are on this machine."""
    return {model_id: files for model_id, files in models.items() if isinstance(files, ModelFiles)}


def _place(files: ModelFiles | HubModel) -> str:
    return str(files.path) if isinstance(files, ModelFiles) else str(files)


def _parse(argument: str) -> ModelFiles | HubModel:
    name, equals, text = argument.partition("=")
    if not equals:
        name, text = "", argument
    if text.startswith(HUB_PREFIX):
        return _parse_hub(name, text)
    path = Path(text).expanduser().resolve()
    if not path.exists():
        raise InvalidRequest(f"model {argument!r}: {str(path)!r} does not exist")
    if not _is_model(path):
        raise InvalidRequest(
            f"model {argument!r}: {str(path)!r} is neither a directory with a {CONFIG_FILE} nor a {GGUF_SUFFIX} file"
        )
    return ModelFiles(check_model_id(name or _default_id(path)), path)


def _parse_hub(name: str, text: str) -> HubModel:
    match = _HUB_MODEL.fullmatch(text)
    if not match:
        raise InvalidRequest(
            f"{text!r} is no model of the hub: use {HUB_PREFIX}ORG/NAME or {HUB_PREFIX}ORG/NAME@REVISION"
        )
    repo, revision = match[1], match[2] or "main"
    return HubModel(check_model_id(name or _default_id(Path(repo))), repo, revision)


def _is_model(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() if path.is_dir() else path.suffix == GGUF_SUFFIX


def _default_id(path: Path) -> str:
    name = path.name.removesuffix(GGUF_SUFFIX)
    return check_model_id(re.sub(r"[^A-Za-z0-9._-]+", "-", name).lower())
