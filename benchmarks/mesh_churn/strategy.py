"""What decides which node holds what. One instance sees one run of a trace."""

from __future__ import annotations

from typing import Protocol

from benchmarks.mesh_churn.catalogue import Catalogue
from benchmarks.mesh_churn.clock import Clock
from benchmarks.mesh_churn.sim_node import Order, SimNode
from meshnet.directive import DirectiveState


class Surroundings(Protocol):
    """What a strategy may do: look at the clock, and order a node to load or drop layers."""

    @property
    def clock(self) -> Clock: ...
    @property
    def catalogue(self) -> Catalogue: ...

    def order(self, node_id: str, order: Order, reason: str) -> None:
        """The node carries out its orders one after the other."""

    def abandon(self, node: SimNode) -> None:
        """The node forgets all orders, also the one that it is at."""


class Strategy(Protocol):
    """Told of what can be seen from outside. A node that dies tells nobody: see `tick`."""

    name: str

    def joined(self, node: SimNode) -> None:
        """A new process with empty memory."""

    def draining(self, node: SimNode) -> None:
        """It will leave soon."""

    def left(self, node: SimNode) -> None:
        """It said so."""

    def heard_again(self, node: SimNode) -> None:
        """The end of a silence."""

    def reported(self, node: SimNode, order: Order, state: DirectiveState, failure: str) -> None:
        """A step of an order."""

    def tick(self, audible: list[SimNode], silent: list[SimNode]) -> None:
        """Every few seconds: who was heard since the last one, and who was not: silent, or dead for not long."""
