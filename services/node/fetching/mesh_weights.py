"""The weights that this node fetches: which models, from whom, and where they are kept."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model import LayerRange, ModelManifest
from meshnet.security.shared_secret import SharedSecret
from meshnet.topology import Node, Topology
from services.node.fetching.fetcher import Fetcher, Progress
from services.node.fetching.peer_source import PeerSource
from services.node.fetching.ranges import make_client
from services.node.fetching.source import Source
from services.node.files.fetched import FetchedModel, fetched_folder
from services.node.files.manifest import shard_tensors


class MeshWeights:
    """`root`: where fetched weights are kept. `topology` gives the latest snapshot. `hub`: models that this node was
    told to take from a hub. For all threads.
    """

    def __init__(
        self,
        root: Path,
        node_id: str,
        site: str,
        topology: Callable[[], Topology],
        hub: Mapping[str, Source] = MappingProxyType({}),
        secret: SharedSecret | None = None,
    ) -> None:
        self._root = root
        self._node_id = node_id
        self._site = site
        self._topology = topology
        self._hub = hub
        self._secret = secret
        self._stopping = threading.Event()
        self._opening = threading.Lock()
        self._opened: dict[Path, FetchedModel] = {}

    def served(self, model_id: str, revision: str) -> ModelManifest | None:
        """The manifest of a model that the mesh serves at this revision, as far as is known here."""
        model = self._topology().models.get(model_id)
        return model.manifest if model and model.manifest.revision == revision else None

    def fetch(self, manifest: ModelManifest, layers: LayerRange, progress: Progress) -> FetchedModel:
        """Blocks until all tensors of the shard are here; returns what they are in. Raises LoadFailed."""

        def report(bytes_done: int, bytes_total: int) -> None:
            self._check_running()
            progress(bytes_done, bytes_total)

        model_id, revision = manifest.model_id, manifest.revision
        # No redirects and no proxies: what is asked is a member of the mesh.
        with make_client(follow_redirects=False, secret=self._secret) as client:
            fetcher = Fetcher(model_id, revision, lambda: self._sources(client, manifest), self._wait)
            model = self.find(model_id, revision)
            if model is None:
                # Without the lock, because it may take long.
                model = fetcher.open(self._root)
                with self._opening:
                    model = self._opened.setdefault(model.folder, model)
            fetcher.fetch(model, shard_tensors(model.description, layers), report)
        return model

    def find(self, model_id: str, revision: str) -> FetchedModel | None:
        """What is here of a revision of a model, for others who want it. Raises InvalidRequest for what is none."""
        folder = fetched_folder(self._root, model_id, revision)
        with self._opening:
            if folder not in self._opened:
                try:
                    self._opened[folder] = FetchedModel.open(folder)
                except BadFiles:
                    return None
            return self._opened[folder]

    def complete(self, model_id: str, model: FetchedModel, names: Collection[str]) -> None:
        """Brings tensors that another node asks for, if they are of a model that this one takes from a hub.

        Blocks. Raises LoadFailed.
        """
        if source := self._hub.get(model_id):
            fetcher = Fetcher(model_id, model.folder.name, lambda: [source], self._wait)
            fetcher.fetch(model, frozenset(names) & model.description.tensors.keys(), lambda done, total: None)

    def stop(self) -> None:
        """Ends all fetches soon; what they have brought stays for the next."""
        self._stopping.set()

    def _wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)
        self._check_running()

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise LoadFailed("the node is stopping")

    def _sources(self, client: httpx.Client, manifest: ModelManifest) -> Sequence[Source]:
        model_id, revision = manifest.model_id, manifest.revision
        nodes = (node for node in self._topology().nodes.values() if _may_have(node, model_id))
        sources: list[Source] = [
            PeerSource(client, node.node_id, node.forward_address, model_id, revision)
            for node in sorted(nodes, key=self._preference)
            if node.node_id != self._node_id
        ]
        hub = self._hub.get(model_id)
        # It is the nearest to have all of them for sure; peers may have to ask it in their turn.
        return [hub, *sources] if hub else sources

    def _preference(self, node: Node) -> tuple[bool, bool, str]:
        """Nodes that answer, near ones, and among these another one first for each node that asks."""
        spread = hashlib.sha256(f"{self._node_id} {node.node_id}".encode()).hexdigest()
        return not node.alive, node.site != self._site, spread


def _may_have(node: Node, model_id: str) -> bool:
    """It has the files, or has fetched some of them itself."""
    return not node.stub and (model_id in node.available_models or bool(node.layers(model_id)))
