"""Who is gone from the mesh: told once, and never because the tracker was away."""

from __future__ import annotations

from dataclasses import replace

from meshnet.topology import Node, Topology
from services.node.core.members import LostNode, Members
from tests import models

A, B, C = (models.node(node_id, (0, 12)) for node_id in "abc")
LEASE = 15.0


def of(*nodes: Node) -> Topology:
    return models.topology(*nodes)


def joined() -> Members:
    members = Members()
    members.reconnected(0.0, LEASE)
    assert members.update(of(A, B, C), 0.0) == ()
    return members


def test_a_node_that_leaves_and_one_that_is_lost_are_told_apart_and_told_once() -> None:
    members = joined()
    assert members.update(of(A, C), 1.0) == (LostNode("b", "left the mesh"),)
    assert members.update(of(A, replace(C, alive=False)), 2.0) == ()
    assert members.update(of(A), 3.0) == (LostNode("c", "was lost"),)
    assert members.update(of(A), 4.0) == ()


def test_a_node_at_another_address_is_not_the_one_that_it_was() -> None:
    assert joined().update(of(A, replace(B, forward_address="127.0.0.1:9"), C), 1.0) == (
        LostNode("b", "was restarted"),
    )


def test_a_tracker_that_begins_anew_loses_nobody_who_comes_back_within_a_lease() -> None:
    members = joined()
    members.reconnected(100.0, LEASE)
    assert members.expire(100.0) == ()
    assert members.update(of(A), 101.0) == ()
    assert members.topology.nodes.keys() == {"a", "b", "c"}
    assert [node.alive for node in members.topology.nodes.values()] == [True, False, False]
    assert members.update(of(A, B), 102.0) == ()
    assert members.topology.nodes["b"].alive
    assert members.expire(100.0 + LEASE) == (LostNode("c", "was lost"),)
    assert members.topology == of(A, B)


def test_a_node_that_came_back_and_leaves_is_gone_at_once() -> None:
    members = joined()
    members.reconnected(100.0, LEASE)
    members.update(of(A, B), 101.0)
    assert members.update(of(A), 102.0) == (LostNode("b", "left the mesh"),)
    assert members.topology.nodes.keys() == {"a", "c"}
