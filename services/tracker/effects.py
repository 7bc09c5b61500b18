"""What the mesh is set up with, and what a change of it asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from meshnet.directive import Directive
from meshnet.model import KvPrecision
from services.tracker.placement import Policy
from services.tracker.remembered import Save


@dataclass(frozen=True, slots=True)
class Note:
    """One event for the log, at a level of `logging`."""

    text: str
    level: int = logging.INFO


@dataclass(frozen=True, slots=True)
class Effects:
    """What a change asks for: new directives to send, a new topology to publish, events to log, state to save."""

    directives: tuple[Directive, ...] = ()
    topology_changed: bool = False
    notes: tuple[Note, ...] = ()
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """A node is suspect after `suspect_seconds` of silence, and lost after `lease_seconds`.

    `auto_deploy`: models to deploy once a node has their files, with `auto_kv_tokens` (0: the context length)
    at `auto_kv_precision`.

    After a restart, nodes that hold shards come back one by one: nothing is placed for `settle_seconds` from the first
    of them, so that nobody loads what another one is about to report. For `stale_seconds` after a node has reported a
    finished directive, a heartbeat that was already on its way may tell of older shards, and these are not taken.

    A node that says nothing of its directives for `answer_seconds`, though it is alive, is given up for placement.
    """

    lease_seconds: float = 15.0
    suspect_seconds: float = 7.5
    auto_deploy: tuple[str, ...] = ()
    auto_kv_tokens: int = 0
    auto_kv_precision: KvPrecision = KvPrecision.BFLOAT16
    settle_seconds: float = 8.0
    stale_seconds: float = 1.0
    answer_seconds: float = 120.0
    policy: Policy = field(default_factory=Policy)
