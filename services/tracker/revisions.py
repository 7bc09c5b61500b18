"""Whose weights count as a model's: those of the revision that the mesh serves. Pure."""

from __future__ import annotations

from meshnet.topology import Node


def is_of_revision(node: Node, model_id: str, revision: str, served: str) -> bool:
    """Whether weights on a node are of the `served` revision of a model. `revision` is what they are said to be of;
    empty: of the node's own files. `node.available_models`: models whose files it has at the served revision."""
    return revision == served or (not revision and model_id in node.available_models)
