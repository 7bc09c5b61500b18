"""Gives other nodes of the mesh the weights that this one has, under the node's HTTP server. It only reads.

GET /models/{model}/{revision} is a description, GET .../files/{file} a part of a weight file (by range), and
POST .../digests the digests of tensors. No path comes from a message: files are those that the description names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from meshnet.errors import InvalidRequest, LoadFailed, UnknownModel
from meshnet.model_files import ModelFiles
from services.node.fetching.mesh_weights import MeshWeights
from services.node.files.description import Description, describe, description_to_json
from services.node.files.fetched import FetchedModel, file_digest

BODY_SECONDS = 10.0
# Hashing is for the processor, of which the layers want all.
MAX_HASHING = 1


@dataclass(slots=True)
class _Offered:
    """`present`: stored names of the tensors that are here. `state`: what the files were when they were read. `fetched`
    is what they were fetched to, and more may be."""

    folder: Path
    description: Description
    revision: str
    present: Set[str]
    state: tuple[object, ...] = ()
    fetched: FetchedModel | None = None
    json: bytes = b""
    digests: dict[str, str] = field(default_factory=dict)


class FileServer:
    """`models`: those whose files are here. `weights`: what was fetched of others, which is passed on."""

    def __init__(self, models: Mapping[str, ModelFiles], weights: MeshWeights | None) -> None:
        self._models = models
        self._weights = weights
        self._offered: dict[str, _Offered] = {}
        self._reading = asyncio.Lock()
        self._hashing = asyncio.Semaphore(MAX_HASHING)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/models/{model}/{revision}", self._describe)
        router.add_get("/models/{model}/{revision}/files/{file}", self._file)
        router.add_post("/models/{model}/{revision}/digests", self._digests)

    async def _describe(self, request: web.Request) -> web.Response:
        offered = await self._find(request)
        if not offered.json:
            offered.json = await asyncio.to_thread(lambda: description_to_json(offered.description).encode())
        return web.Response(body=offered.json, content_type="application/json")

    async def _file(self, request: web.Request) -> web.FileResponse:
        offered, file = await self._find(request), request.match_info["file"]
        if file not in offered.description.sizes:
            raise UnknownModel(f"the model has no weight file {file!r}")
        return web.FileResponse(offered.folder / file, chunk_size=1 << 20)

    async def _digests(self, request: web.Request) -> web.Response:
        offered = await self._find(request)
        names = await _read_names(request)
        if missing := [name for name in names if name not in offered.present]:
            await self._complete(request.match_info["model"], offered, missing)
        if missing := [name for name in names if name not in offered.present]:
            raise UnknownModel(f"tensor {missing[0]!r} is not here")
        for name in names:
            if name not in offered.digests:
                tensor = offered.description.tensors[name]
                path = offered.folder / tensor.file
                async with self._hashing:
                    offered.digests[name] = await asyncio.to_thread(file_digest, path, tensor.begin, tensor.num_bytes)
        return web.json_response({"digests": {name: offered.digests[name] for name in names}})

    async def _complete(self, model_id: str, offered: _Offered, names: Sequence[str]) -> None:
        if self._weights and offered.fetched:
            try:
                await asyncio.to_thread(self._weights.complete, model_id, offered.fetched, names)
            except LoadFailed as error:
                raise UnknownModel(f"tensor {names[0]!r} is not here, and cannot be brought: {error}") from error

    async def _find(self, request: web.Request) -> _Offered:
        """Raises UnknownModel if this revision of the model is not here, or no longer."""
        model_id, revision = request.match_info["model"], request.match_info["revision"]
        absent = f"no weights of model {model_id!r} at revision {revision!r} are here"
        try:
            async with self._reading:
                own = self._models.get(model_id)
                if own and (offered := await self._own(own)).revision == revision:
                    return offered
                if self._weights and (model := await asyncio.to_thread(self._weights.find, model_id, revision)):
                    return self._fetched(f"{model_id}/{revision}", model)
        except (LoadFailed, InvalidRequest, OSError) as error:
            raise UnknownModel(f"{absent}: {error}") from error
        raise UnknownModel(absent)

    async def _own(self, files: ModelFiles) -> _Offered:
        """What was read before, if nobody has written to the files since."""
        offered = self._offered.get(files.model_id)
        if offered is None or await asyncio.to_thread(_state, offered) != offered.state:
            self._offered.pop(files.model_id, None)
            offered = self._offered[files.model_id] = await asyncio.to_thread(_read, files)
        return offered

    def _fetched(self, key: str, model: FetchedModel) -> _Offered:
        offered = self._offered.get(key)
        if offered is None or offered.fetched is not model:
            offered = _Offered(model.folder, model.description, model.folder.name, model.present, fetched=model)
            self._offered[key] = offered
        return offered


def _read(files: ModelFiles) -> _Offered:
    description = describe(files)
    folder = files.path.parent if files.is_gguf else files.path
    offered = _Offered(folder, description, description.revision(), description.tensors.keys())
    offered.state = _state(offered)
    return offered


def _state(offered: _Offered) -> tuple[object, ...]:
    """Changes whenever somebody writes to the files."""
    state: list[object] = []
    for file in offered.description.sizes:
        try:
            found = (offered.folder / file).stat()
            state.append((found.st_size, found.st_mtime_ns, found.st_ino))
        except OSError as error:
            state.append(error.errno)
    return tuple(state)


async def _read_names(request: web.Request) -> list[str]:
    """Raises InvalidRequest if the body is not a list of names."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            stated: Any = await request.json()
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not JSON") from error
    names = stated.get("tensors") if isinstance(stated, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest('the body must be {"tensors": [names]}')
    return names
