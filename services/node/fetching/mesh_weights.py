"""The mesh as a source of weights: which nodes have a model, and the fetch of a shard from them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from meshnet.errors import LoadFailed
from meshnet.model import LayerRange, ModelManifest
from meshnet.topology import Node, Topology
from services.node.fetching.fetcher import Fetcher, Progress
from services.node.fetching.peer_source import PeerSource
from services.node.fetching.ranges import make_client


class MeshWeights:
    """`root`: where fetched weights are kept. `topology` gives the latest snapshot, from any thread."""

    def __init__(self, root: Path, node_id: str, site: str, topology: Callable[[], Topology]) -> None:
        self._root = root
        self._node_id = node_id
        self._site = site
        self._topology = topology
        self._stopping = threading.Event()

    def served(self, model_id: str, revision: str) -> ModelManifest | None:
        """The manifest of a model that the mesh serves at this revision, as far as is known here."""
        model = self._topology().models.get(model_id)
        return model.manifest if model and model.manifest.revision == revision else None

    def fetch(self, manifest: ModelManifest, layers: LayerRange, progress: Progress) -> Path:
        """Blocks until all tensors of the shard are here; returns their folder. Raises LoadFailed."""

        def report(bytes_done: int, bytes_total: int) -> None:
            self._check_running()
            progress(bytes_done, bytes_total)

        def wait(seconds: float) -> None:
            self._stopping.wait(seconds)
            self._check_running()

        # No redirects and no proxies: what is asked is a member of the mesh.
        with make_client(follow_redirects=False) as client:
            fetcher = Fetcher(self._root, manifest, layers, lambda: self._sources(client, manifest), wait)
            return fetcher.fetch(report).folder

    def stop(self) -> None:
        """Ends all fetches soon; what they have brought stays for the next."""
        self._stopping.set()

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise LoadFailed("the node is stopping")

    def _sources(self, client: httpx.Client, manifest: ModelManifest) -> Sequence[PeerSource]:
        model_id, revision = manifest.model_id, manifest.revision
        nodes = (node for node in self._topology().nodes.values() if _may_have(node, model_id))
        return [
            PeerSource(client, node.node_id, node.forward_address, model_id, revision)
            for node in sorted(nodes, key=self._preference)
            if node.node_id != self._node_id
        ]

    def _preference(self, node: Node) -> tuple[bool, bool, str]:
        """Nodes that answer, near ones, and among these another one first for each node that asks."""
        spread = hashlib.sha256(f"{self._node_id} {node.node_id}".encode()).hexdigest()
        return not node.alive, node.site != self._site, spread


def _may_have(node: Node, model_id: str) -> bool:
    """It has the files, or has fetched some of them itself."""
    return not node.stub and (model_id in node.available_models or bool(node.layers(model_id)))
