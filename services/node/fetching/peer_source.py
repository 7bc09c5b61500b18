"""Weights from another node of the mesh (served by services.node.file_server)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import quote

import httpx

from meshnet.errors import BadFiles
from services.node.fetching.ranges import check_status, read_bounded, said, stream_range
from services.node.fetching.source import GRACE_SECONDS, SourceFailed
from services.node.files.description import Description, description_from_json

MAX_DESCRIPTION_BYTES = 256 << 20
MAX_DIGESTS_BYTES = 16 << 20


class PeerSource:
    """services.node.fetching.source.Source. `address` is a node's in the topology, `host:port`."""

    def __init__(self, client: httpx.Client, node_id: str, address: str, model_id: str, revision: str) -> None:
        self.name = f"node {node_id}"
        self._client = client
        self._url = f"http://{address}/models/{quote(model_id, safe='')}/{quote(revision, safe='')}"

    def describe(self) -> Description:
        try:
            return description_from_json(self._ask("GET", "", MAX_DESCRIPTION_BYTES))
        except BadFiles as error:
            raise SourceFailed(str(error)) from error

    def stream(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        return stream_range(self._client, f"{self._url}/files/{quote(file, safe='')}", begin, end)

    def digests(self, names: Collection[str]) -> Mapping[str, str]:
        body = json.dumps({"tensors": sorted(names)}).encode()
        try:
            digests = json.loads(self._ask("POST", "/digests", MAX_DIGESTS_BYTES, body))["digests"]
            return {name: str(digests[name]) for name in names}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceFailed("it answered nonsense when asked for digests") from error

    def _ask(self, method: str, path: str, limit: int, body: bytes | None = None) -> bytes:
        try:
            with self._client.stream(method, self._url + path, content=body) as answer:
                check_status(answer, 200)
                return read_bounded(answer, limit, GRACE_SECONDS)
        except httpx.HTTPError as error:
            raise SourceFailed(said(error)) from error
