"""What is worth a line in the log about coverage. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from meshnet.topology import Topology
from services.tracker.effects import Note
from services.tracker.placement import Plan


class CoverageNews:
    """Which models have become covered or uncovered from one snapshot to the next."""

    def __init__(self) -> None:
        self._covered: set[str] = set()

    def of(self, topology: Topology) -> list[Note]:
        covered = {model_id for model_id in topology.models if topology.coverage(model_id).complete}
        notes = [Note(f"model {i} covered: every layer is served") for i in sorted(covered - self._covered)]
        for model_id in sorted((self._covered - covered) & topology.models.keys()):
            missing = ", ".join(map(str, topology.coverage(model_id).missing))
            notes.append(Note(f"model {model_id} uncovered: layers {missing} are not served", logging.WARNING))
        self._covered = covered
        return notes


def shortfall_news(model_ids: Iterable[str], before: Mapping[str, str], plan: Plan) -> list[Note]:
    """What cannot be placed, where that differs from what was said before."""
    texts = {model_id: plan.shortfall(model_id) for model_id in model_ids}
    return [
        Note(f"model {model_id} cannot be placed: {text}", logging.WARNING)
        for model_id, text in texts.items()
        if text and text != before[model_id]
    ]
