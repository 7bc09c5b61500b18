"""Sessions that nodes could not be told to free."""

from __future__ import annotations

from services.node.core.owed_frees import MAX_SESSIONS, REMEMBERED_SECONDS, RETRY_SECONDS, OwedFrees


def test_nodes_that_are_here_are_told_again_and_again_until_they_know() -> None:
    owed = OwedFrees()
    owed.add("b", "s1", 0.0)
    owed.add("b", "s2", 0.5)
    assert owed.due({"b"}, 0.6) == ()
    assert owed.due({"b"}, RETRY_SECONDS) == ("b",)
    assert owed.of("b") == ("s1", "s2")
    assert owed.due({"b"}, RETRY_SECONDS + 0.1) == ()
    owed.settled("b", "s1")
    assert owed.due({"b"}, 2 * RETRY_SECONDS) == ("b",)
    owed.settled("b", "s2")
    owed.settled("b", "s2")
    assert owed.due({"b"}, 3 * RETRY_SECONDS) == owed.of("b") == ()


def test_a_node_that_is_away_is_told_when_it_is_back() -> None:
    owed = OwedFrees()
    owed.add("b", "s", 0.0)
    assert owed.due(set(), 100.0) == ()
    assert owed.due({"b"}, 100.1) == ("b",)


def test_what_leases_have_freed_is_forgotten() -> None:
    owed = OwedFrees()
    owed.add("b", "s", 0.0)
    assert owed.due({"b"}, REMEMBERED_SECONDS + 1.0) == owed.of("b") == ()


def test_it_does_not_grow_without_end() -> None:
    owed = OwedFrees()
    for index in range(MAX_SESSIONS + 10):
        owed.add("b", f"s{index}", 0.0)
    assert len(owed.of("b")) == MAX_SESSIONS
    assert owed.of("b")[0] == "s10"
