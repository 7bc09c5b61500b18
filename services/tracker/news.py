"""What is worth a line in the log about coverage. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from meshnet.model import merge_layers
from meshnet.topology import DeployedModel, Node
from services.tracker.effects import Note
from services.tracker.placement import Plan


class CoverageNews:
    """How many nodes serve each layer of each model, and which models have become covered or uncovered."""

    def __init__(self) -> None:
        self._serving: dict[str, list[int]] = {}
        self._covered: set[str] = set()

    def set_models(self, models: Mapping[str, DeployedModel], nodes: Iterable[Node]) -> None:
        """Other models are deployed: counts anew."""
        self._serving = {model_id: [0] * model.manifest.num_layers for model_id, model in models.items()}
        for node in nodes:
            self._count(node, 1)

    def changed(self, before: Node | None, after: Node | None) -> None:
        self._count(before, -1)
        self._count(after, 1)

    def take(self) -> list[Note]:
        """What has become of models since the last time."""
        covered = {model_id for model_id, serving in self._serving.items() if 0 not in serving}
        notes = [Note(f"model {i} covered: every layer is served") for i in sorted(covered - self._covered)]
        for model_id in sorted((self._covered - covered) & self._serving.keys()):
            gaps = merge_layers({layer for layer, count in enumerate(self._serving[model_id]) if not count})
            missing = ", ".join(map(str, gaps))
            notes.append(Note(f"model {model_id} uncovered: layers {missing} are not served", logging.WARNING))
        self._covered = covered
        return notes

    def _count(self, node: Node | None, sign: int) -> None:
        for model_id in {shard.model_id for shard in node.shards} if node else ():
            serving = self._serving.get(model_id, [])
            for layer in node.layers(model_id) if node else ():
                if layer < len(serving):
                    serving[layer] += sign


def shortfall_news(model_ids: Iterable[str], before: Mapping[str, str], plan: Plan) -> list[Note]:
    """What cannot be placed, where that differs from what was said before."""
    texts = {model_id: plan.shortfall(model_id) for model_id in model_ids}
    return [
        Note(f"model {model_id} cannot be placed: {text}", logging.WARNING)
        for model_id, text in texts.items()
        if text and text != before[model_id]
    ]
