"""What the tracker tells people of a mesh, asked for with grpcurl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from meshnet.model import LayerRange
from tests.e2e.commands import grpcurl
from tests.e2e.mesh import SETTLE_SECONDS, Mesh
from tests.processes import wait_until

Told = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Admin:
    """The Admin service of a mesh's tracker. Answers are JSON objects with the field names of the schema."""

    mesh: Mesh

    def call(self, method: str, data: Told | None = None) -> Told:
        (answer,) = _objects(grpcurl(self.mesh.tracker_address, f"meshnet.v1.Admin/{method}", data=data))
        return answer

    def directives(self) -> list[Told]:
        """Oldest first."""
        return list(self.call("ListDirectives").get("directives", ()))

    def coverage(self, model_id: str) -> Told:
        (coverage,) = self.call("GetCoverage", {"model_id": model_id})["models"]
        return dict(coverage)

    def node(self, node_id: str) -> Told:
        return dict(self.call("DescribeNode", {"node_id": node_id})["node"])

    def held(self) -> dict[str, list[LayerRange]]:
        """By node the layers of all that it holds or loads."""
        nodes = self.call("ListNodes").get("nodes", ())
        return {node["node_id"]: [layers_of(shard) for shard in node.get("shards", ())] for node in nodes}

    def events(self) -> list[str]:
        """The newest, oldest first."""
        data = {"past": 1000, "past_only": True}
        told = grpcurl(self.mesh.tracker_address, "meshnet.v1.Admin/WatchEvents", data=data)
        return [event["text"] for event in _objects(told)]

    def settle(self) -> None:
        """Waits until no directive is open and none would be issued."""
        wait_until(self._is_settled, SETTLE_SECONDS, "the mesh is settled", self.mesh.logs)

    def _is_settled(self) -> bool:
        """Asked for directives last: those that were issued after the plan was looked at are open."""
        return not self.call("GetPlan").get("directives") and all(is_final(d) for d in self.directives())


def is_final(directive: Told) -> bool:
    return directive["state"].rpartition("_")[2] in ("READY", "DROPPED", "FAILED")


def is_load(directive: Told) -> bool:
    return bool(directive["kind"] == "DIRECTIVE_KIND_LOAD_SHARD")


def layers_of(told: Told) -> LayerRange:
    """Of a shard or a directive. Zeros are not told."""
    layers = told["layers"]
    return LayerRange(layers.get("start", 0), layers["end"])


def _objects(text: str) -> list[Told]:
    """grpcurl writes the messages of a stream one after the other."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found
