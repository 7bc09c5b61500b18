from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet.errors import InvalidRequest, Unregistered
from meshnet.topology import Node, Shard
from services.tracker.registry import MAX_LAYERS, Registry
from tests.services.tracker.meshes import MB, fetcher, manifest, node, shard

LEASE = 15.0
SUSPECT = 7.5


@pytest.fixture
def registry() -> Registry:
    return Registry(LEASE, SUSPECT)


def join(
    registry: Registry, node_id: str = "n1", incarnation: str = "i1", revision: str = "r1", now: float = 0
) -> None:
    registry.register(node(node_id, MB), incarnation, [manifest(revision=revision)], now)


def test_a_node_is_here_until_its_lease_runs_out(registry: Registry) -> None:
    join(registry, now=100.0)
    assert registry.expire(114.9) == []
    assert list(registry.nodes()) == ["n1"]
    assert registry.expire(115.0) == ["n1"]
    assert registry.nodes() == {}
    with pytest.raises(Unregistered, match="register again"):
        registry.member("n1", "i1")


def test_a_heartbeat_renews_the_lease(registry: Registry) -> None:
    join(registry, now=0)
    registry.renew(registry.member("n1", "i1"), now=10.0)
    assert registry.expire(20.0) == []
    assert registry.expire(25.0) == ["n1"]


def test_leases_are_extended_when_the_tracker_was_away(registry: Registry) -> None:
    join(registry, now=0)
    registry.extend_leases(100.0)
    assert registry.expire(100.0) == []
    assert registry.expire(115.0) == ["n1"]


def test_a_newer_process_replaces_the_older_one(registry: Registry) -> None:
    join(registry)
    outcome = registry.register(node("n1", MB, shards=[shard(0, 3)]), "i2", [manifest()], 1.0)
    assert (outcome.is_new, outcome.restarted) == (False, True)
    assert registry.nodes()["n1"].shards == (shard(0, 3),)
    with pytest.raises(Unregistered, match="another process"):
        registry.member("n1", "i1")
    with pytest.raises(Unregistered, match="replaced"):
        join(registry, incarnation="i1")
    assert registry.member("n1", "i2").incarnation == "i2"


def test_the_same_process_may_register_again(registry: Registry) -> None:
    join(registry, now=0)
    outcome = registry.register(node("n1", MB), "i1", [manifest()], 10.0)
    assert (outcome.is_new, outcome.restarted) == (False, False)
    assert registry.expire(20.0) == []


def test_a_node_that_left_may_come_back(registry: Registry) -> None:
    join(registry)
    registry.leave("n1", "i1")
    assert registry.nodes() == {}
    with pytest.raises(Unregistered):
        registry.leave("n1", "i1")
    join(registry)
    assert list(registry.nodes()) == ["n1"]


def test_the_first_revision_counts_while_a_node_offers_it(registry: Registry) -> None:
    join(registry, "n1", revision="r1")
    outcome = registry.register(node("n2", MB), "i1", [manifest(revision="r2")], 0)
    assert outcome.other_revisions == ("m",)
    assert registry.holders("m") == ("n1",)
    assert registry.nodes()["n2"].available_models == frozenset()
    registry.leave("n1", "i1")
    assert registry.manifests["m"].revision == "r2"
    assert registry.holders("m") == ("n2",)


def test_a_pinned_revision_stays(registry: Registry) -> None:
    join(registry, "n1", revision="r1")
    join(registry, "n2", revision="r2")
    registry.pin(manifest())
    registry.leave("n1", "i1")
    assert registry.manifests["m"].revision == "r1"
    assert registry.holders("m") == ()
    registry.unpin("m")
    assert registry.manifests["m"].revision == "r2"
    registry.leave("n2", "i1")
    assert registry.manifests == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(node("n1", MB), node_id="../n1"), "not a node id"),
        (replace(node("n1", MB), forward_address="nowhere"), "not an address"),
        (replace(node("n1", MB), forward_address="0.0.0.0:80"), "others can reach"),
        (replace(node("n1", MB), grpc_address="10.0.0.1:0"), "others can reach"),
        (replace(node("n1", MB), grpc_address="u@host/path:80"), "others can reach"),
        (node("n1", MB, shards=[shard(0, 31)]), "which has 30"),
        (node("n1", MB, shards=[shard(0, 4_000_000_000)]), "which has 30"),
        (node("n1", MB, shards=[shard(0, 1, "other")]), "no manifest"),
        (node("n1", MB, shards=[replace(shard(0, 1), bytes_total=2**63)]), "limit"),
    ],
)
def test_a_description_without_sense_is_refused(registry: Registry, wrong: Node, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        registry.register(wrong, "i1", [manifest()], 0)
    assert registry.nodes() == {}


def test_manifests_without_sense_are_refused(registry: Registry) -> None:
    for wrong in (
        manifest(revision=""),
        manifest(num_layers=MAX_LAYERS + 1),
        manifest(layer_bytes=2**63),
        replace(manifest(), kv_bytes_per_token=2**60),
    ):
        with pytest.raises(InvalidRequest, match="manifest of model 'm'"):
            registry.register(node("n1", MB), "i1", [wrong], 0)
    with pytest.raises(InvalidRequest, match="incarnation"):
        registry.register(node("n1", MB), "", [manifest()], 0)
    assert registry.manifests == {}


def test_silence_makes_a_node_suspect_once(registry: Registry) -> None:
    join(registry, "n1", now=0)
    join(registry, "n2", now=1.0)
    assert registry.suspect(7.4) == []
    assert registry.suspect(7.5) == ["n1"]
    assert registry.suspect(8.0) == []
    assert [n.alive for n in registry.nodes().values()] == [False, True]
    assert registry.renew(registry.member("n1", "i1"), 9.0)
    assert not registry.renew(registry.member("n1", "i1"), 9.1)
    assert registry.nodes()["n1"].alive


def test_nobody_is_suspect_because_the_tracker_was_away(registry: Registry) -> None:
    join(registry, now=0)
    registry.extend_leases(100.0)
    assert registry.suspect(107.4) == []
    assert registry.suspect(107.5) == ["n1"]


def test_a_fetching_node_may_hold_what_the_mesh_does_not_know(registry: Registry) -> None:
    held = (shard(0, 40, "unknown", revision="x"), shard(0, 3, "unknown"))
    registry.register(fetcher("f", MB, shards=held), "i1", [], 0)
    assert registry.nodes()["f"].shards == held
    registry.set_shards(registry.member("f", "i1"), held[:1])
    assert registry.nodes()["f"].shards == held[:1]
    assert registry.manifests == {}


@pytest.mark.parametrize(
    "wrong",
    [
        [shard(MAX_LAYERS, MAX_LAYERS + 1, "x")],
        [shard(0, MAX_LAYERS, "x"), shard(0, 1, "y")],
        [shard(0, 1, "x", revision="r" * 10_000)],
        [replace(shard(0, 1, "x"), bytes_done=2**63)],
        # Of its own files it knows better.
        [shard(0, 31)],
        [shard(0, 31, revision="r1")],
    ],
)
def test_what_a_fetching_node_cannot_hold_is_refused(registry: Registry, wrong: list[Shard]) -> None:
    with pytest.raises(InvalidRequest, match=r"limit|characters|which has 30"):
        registry.register(fetcher("f", MB, shards=wrong), "i1", [manifest()], 0)
    registry.register(fetcher("f", MB), "i1", [manifest()], 0)
    with pytest.raises(InvalidRequest):
        registry.set_shards(registry.member("f", "i1"), wrong)
    assert registry.nodes()["f"].shards == ()


def test_who_holds_layers_is_told_when_the_known_revision_changes(registry: Registry) -> None:
    registry.register(fetcher("f", MB, shards=[shard(0, 3, revision="r1")]), "i1", [], 0)
    registry.changed.clear()
    join(registry, "n1", revision="r1")
    assert registry.changed == {"f", "n1"}
    registry.changed.clear()
    join(registry, "n2", revision="r1")
    assert registry.changed == {"n2"}
