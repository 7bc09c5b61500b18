"""What a model would take of nodes' memory, and what of it fits where. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from meshnet.model import (
    BLOCK_TOKENS,
    KvPrecision,
    LayerRange,
    LayerStep,
    ModelManifest,
    Quantization,
    WeightBytes,
    Workspace,
    blocks_for,
)

# What placement keeps free on every node at least, for the steps.
LEAST_WORKSPACE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model as the headers of its weight files describe it, with KV caches of `kv_tokens` tokens, stored at
    `kv_precision`.

    `workspace`: what a step takes beside weights and KV caches, as predicted; `entry_workspace`: on an entry node.
    """

    manifest: ModelManifest
    kv_tokens: int
    workspace: WeightBytes
    entry_workspace: WeightBytes
    kv_precision: KvPrecision = KvPrecision.BFLOAT16

    def kv_bytes(self, quantization: Quantization) -> int:
        """KV cache of one layer, in whole blocks."""
        return self.manifest.kv_bytes(blocks_for(self.kv_tokens) * BLOCK_TOKENS, quantization, self.kv_precision)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Inspection:
        """What `to_json` of this version has written."""
        stated = json.loads(text)
        manifest = stated["manifest"]
        layers = tuple(WeightBytes(**layer) for layer in manifest["layers"])
        return Inspection(
            manifest=ModelManifest(
                **manifest
                | {
                    "layers": layers,
                    "entry": WeightBytes(**manifest["entry"]),
                    "steps": tuple(LayerStep(**step) for step in manifest["steps"]),
                    "workspaces": tuple(
                        Workspace(found["kv_tokens"], WeightBytes(**found["at_precision"]))
                        for found in manifest["workspaces"]
                    ),
                }
            ),
            kv_tokens=stated["kv_tokens"],
            workspace=WeightBytes(**stated["workspace"]),
            entry_workspace=WeightBytes(**stated["entry_workspace"]),
            kv_precision=KvPrecision(stated["kv_precision"]),
        )


def fit(inspection: Inspection, quantization: Quantization, vram_bytes: int) -> tuple[LayerRange, ...] | None:
    """The shards of nodes that lend so much each and are filled one after the other, the entry node first.

    None: the entry part with one layer, or some other layer, fits on none of them.
    """
    shards: list[LayerRange] = []
    start = 0
    while start < inspection.manifest.num_layers:
        end = _end(inspection, quantization, vram_bytes, start)
        if end == start:
            return None
        shards.append(LayerRange(start, end))
        start = end
    return tuple(shards)


def _end(inspection: Inspection, quantization: Quantization, vram_bytes: int, start: int) -> int:
    """Where the longest shard ends that begins at `start`: there, if not even one layer fits."""
    manifest, kv_bytes = inspection.manifest, inspection.kv_bytes(quantization)
    workspace = (inspection.workspace if start else inspection.entry_workspace).at(quantization)
    free = vram_bytes - max(workspace, LEAST_WORKSPACE_BYTES) - (0 if start else manifest.entry.at(quantization))
    for layer in range(start, manifest.num_layers):
        free -= manifest.layers[layer].at(quantization) + kv_bytes
        if free < 0:
            return layer
    return manifest.num_layers
