"""Which models nodes have the files of, and which revision of each the mesh serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from meshnet.model import ModelManifest


class Offers:
    """Of each model the mesh knows one revision: the pinned one, else that of the node that has offered it longest.

    Methods that may change the known revision of a model return the ids of the models of which they did.
    """

    def __init__(self) -> None:
        self.manifests: dict[str, ModelManifest] = {}
        self._pinned: set[str] = set()
        self._offered: dict[str, dict[str, ModelManifest]] = {}
        self._of_node: dict[str, frozenset[str]] = {}

    def put(self, node_id: str, manifests: Mapping[str, ModelManifest]) -> set[str]:
        """What a node has now, in the place of what it had."""
        before = self._of_node.get(node_id, frozenset())
        self._of_node[node_id] = frozenset(manifests)
        for model_id in before - manifests.keys():
            del self._offered[model_id][node_id]
        for model_id, manifest in manifests.items():
            self._offered.setdefault(model_id, {})[node_id] = manifest
        return self._settle(before | manifests.keys())

    def remove(self, node_id: str) -> set[str]:
        gone = self._of_node.pop(node_id, frozenset())
        for model_id in gone:
            del self._offered[model_id][node_id]
        return self._settle(gone)

    def pin(self, manifest: ModelManifest) -> set[str]:
        """Keeps this revision, whatever nodes offer."""
        known = self.manifests.get(manifest.model_id)
        self.manifests[manifest.model_id] = manifest
        self._pinned.add(manifest.model_id)
        return set() if known == manifest else {manifest.model_id}

    def unpin(self, model_id: str) -> set[str]:
        self._pinned.discard(model_id)
        return self._settle({model_id})

    def is_served(self, manifest: ModelManifest) -> bool:
        """Whether this is the revision that the mesh knows."""
        known = self.manifests[manifest.model_id]
        return (known.revision, known.num_layers) == (manifest.revision, manifest.num_layers)

    def holders(self, model_id: str) -> tuple[str, ...]:
        """Nodes that offer the revision that the mesh knows, by id."""
        offered = self._offered.get(model_id, {})
        return tuple(sorted(node_id for node_id, manifest in offered.items() if self.is_served(manifest)))

    def _settle(self, model_ids: set[str] | frozenset[str]) -> set[str]:
        """Keeps the known revision of a model while a node offers it."""
        changed: set[str] = set()
        for model_id in model_ids - self._pinned:
            offered = self._offered.get(model_id, {})
            known = self.manifests.get(model_id)
            if known is not None and _is_offered(known, offered):
                continue
            if offered:
                self.manifests[model_id] = next(iter(offered.values()))
            else:
                self.manifests.pop(model_id, None)
            changed.add(model_id)
        return changed


def _is_offered(known: ModelManifest, offered: Mapping[str, ModelManifest]) -> bool:
    # The longest offer is nearly always the known one, so this looks at one node, not at all.
    return any(manifest.revision == known.revision for manifest in offered.values())
