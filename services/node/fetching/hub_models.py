"""The models that a node was told to take from a hub: found once, and known from then on without the hub."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from meshnet.errors import BadFiles
from meshnet.model import ModelManifest
from meshnet.model_files import HubModel
from services.node.fetching.hub_source import HubSource
from services.node.fetching.source import SourceFailed
from services.node.files.description import Description
from services.node.files.fetched import FetchedModel, fetched_folder
from services.node.files.manifest import manifest_of
from services.node.files.whole_file import write_whole

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedHubModel:
    manifest: ModelManifest
    source: HubSource


@dataclass(frozen=True, slots=True)
class _Found:
    """What the hub said: the commit, the sizes of its files, and the mesh's revision of the model."""

    commit: str
    sizes: Mapping[str, int]
    revision: str


def open_hub_model(root: Path, model: HubModel) -> OpenedHubModel:
    """`root`: where fetched weights are kept. Raises LoadFailed if it cannot be served, or is nowhere to be found."""
    known, description = _recall(root, model)
    try:
        source = HubSource.resolve(model)
    except SourceFailed as error:
        if known is None:
            raise BadFiles(str(error)) from error
        log.warning("%s; going on with commit %s of before", error, known.commit[:12])
        source = HubSource(model, known.commit, known.sizes)
    if known and description and known.commit == source.commit:
        return OpenedHubModel(manifest_of(model.model_id, description), source)
    return OpenedHubModel(_find(root, model, source), source)


def _find(root: Path, model: HubModel, source: HubSource) -> ModelManifest:
    """Reads what the hub has, and remembers it."""
    log.info("reading the headers and samples of %s", source.name)
    started = time.monotonic()
    try:
        description = source.describe()
        manifest = manifest_of(model.model_id, description)
        FetchedModel.create(fetched_folder(root, model.model_id, manifest.revision), description)
        _remember(root, model, _Found(source.commit, source.sizes, manifest.revision))
    except SourceFailed as error:
        raise BadFiles(f"{model}: {error}") from error
    except OSError as error:
        raise BadFiles(f"{model}: what the hub says of it cannot be kept in {root}: {error.strerror}") from error
    log.info("read them in %.1f s", time.monotonic() - started)
    return manifest


def _path(root: Path, model: HubModel) -> Path:
    return root / model.model_id / f"{model.repo}@{model.revision}.json".replace("/", "--")


def _recall(root: Path, model: HubModel) -> tuple[_Found, Description] | tuple[None, None]:
    try:
        found = _Found(**json.loads(_path(root, model).read_bytes()))
        fetched = FetchedModel.open(fetched_folder(root, model.model_id, found.revision))
    except (OSError, ValueError, TypeError, BadFiles):
        return None, None
    return found, fetched.description


def _remember(root: Path, model: HubModel, found: _Found) -> None:
    write_whole(_path(root, model), json.dumps(asdict(found)))
