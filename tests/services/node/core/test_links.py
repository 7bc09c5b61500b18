"""Which link is measured next, how rarely, and what is told of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshnet.topology import Link, Topology
from services.node.core.links import (
    AGAIN_SECONDS,
    DUTY,
    EVERY_SECONDS,
    FIRST_PAYLOAD_BYTES,
    MAX_LINKS,
    MAX_OTHERS,
    MAX_PAYLOAD_BYTES,
    MAX_USED,
    TRACKER,
    TURN_SECONDS,
    LinkTable,
    Measurement,
)
from tests import models


def mesh(num_nodes: int) -> Topology:
    return models.topology(*(models.node(f"n{index:02}", (0, 12)) for index in range(num_nodes)))


def measure_all(
    table: LinkTable, topology: Topology, used: Sequence[str], now: float, until: float, *, rtt: float = 0.01
) -> list[tuple[float, Measurement]]:
    """Measures whatever is due, at every tenth of a second; each takes no time. Returns what was measured when."""
    done = []
    while now < until:
        measurement = table.next(topology, used, now, busy=False)
        if measurement:
            table.measured(measurement, rtt, rtt + 0.1 if measurement.payload_bytes else None, 0.0, now)
            done.append((now, measurement))
        now += 0.1
    return done


def test_the_tracker_comes_first_then_the_nodes_that_frames_go_to_then_a_few_others() -> None:
    table = LinkTable("n05")
    done = measure_all(table, mesh(30), ["n20", "n03"], 0.0, 10.0)
    assert [measurement.node_id for _, measurement in done] == [TRACKER, "n20", "n03", "n06", "n07", "n08", "n09"]
    assert [link.node_id for link in table.links()] == [TRACKER, "n20", "n03", "n06", "n07", "n08", "n09"]


def test_each_link_is_measured_again_after_a_minute() -> None:
    table = LinkTable("n00")
    times = [
        now for now, measurement in measure_all(table, mesh(2), ["n01"], 0.0, 200.0) if measurement.node_id == "n01"
    ]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(gaps) == 3
    assert all(EVERY_SECONDS <= gap < EVERY_SECONDS + 1 for gap in gaps)


def test_a_long_measurement_is_followed_by_a_longer_pause() -> None:
    table, topology = LinkTable("n00"), mesh(4)
    measurement = table.next(topology, (), 0.0, busy=False)
    assert measurement
    table.measured(measurement, 0.5, 2.0, 3.0, 3.0)
    assert table.next(topology, (), 3.0 + 3.0 * (DUTY - 1) - 0.1, busy=False) is None
    assert table.next(topology, (), 3.0 + 3.0 * (DUTY - 1), busy=False) is not None


def test_frames_that_wait_are_not_held_up_by_a_payload() -> None:
    table, topology = LinkTable("n00"), mesh(1)
    assert table.next(topology, (), 0.0, busy=False) == Measurement(TRACKER, FIRST_PAYLOAD_BYTES)
    busy = table.next(topology, (), 0.0, busy=True)
    assert busy == Measurement(TRACKER, 0)
    table.measured(busy, 0.01, None, 0.0, 0.0)
    assert table.links() == (Link(TRACKER, 0.01),)
    assert table.next(topology, (), AGAIN_SECONDS, busy=False) == Measurement(TRACKER, FIRST_PAYLOAD_BYTES)


def test_the_shortest_recent_round_trip_counts_and_the_throughput_is_smoothed_and_rounded() -> None:
    table, topology = LinkTable("n00"), mesh(1)
    for turn, rtt in enumerate((0.02, 0.0123456, 0.03)):
        measurement = table.next(topology, (), turn * 100.0, busy=False)
        assert measurement
        seconds = rtt + measurement.payload_bytes / (1e6 if turn < 2 else 2e6)
        assert table.measured(measurement, rtt, seconds, 0.0, turn * 100.0) == (turn == 0)
    assert table.links() == (Link(TRACKER, 0.0123, 1.3e6),)
    for turn in range(3, 9):
        measurement = table.next(topology, (), turn * 100.0, busy=True)
        assert measurement
        table.measured(measurement, 0.4, None, 0.0, turn * 100.0)
    assert table.links() == (Link(TRACKER, 0.4, 1.3e6),)


def test_a_fast_link_gets_a_larger_payload_up_to_a_limit() -> None:
    table, topology = LinkTable("n00"), mesh(1)
    sizes = []
    for turn in range(3):
        measurement = table.next(topology, (), turn * 100.0, busy=False)
        assert measurement
        sizes.append(measurement.payload_bytes)
        table.measured(measurement, 0.0, measurement.payload_bytes / 1e9, 0.0, turn * 100.0)
    assert sizes == [FIRST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES]


def test_a_link_that_fails_is_not_reported_until_it_works_again() -> None:
    table, topology = LinkTable("n00"), mesh(2)
    measure_all(table, topology, ["n01"], 0.0, 5.0)
    failing = table.next(topology, ["n01"], 61.0, busy=False)
    assert failing
    table.failed(failing, 0.0, 61.0)
    assert [link.node_id for link in table.links()] == ["n01"]
    measure_all(table, topology, ["n01"], 70.0, 130.0)
    assert [link.node_id for link in table.links()] == [TRACKER, "n01"]


def test_nodes_that_left_are_forgotten_and_others_get_their_turn() -> None:
    table = LinkTable("n00")
    measure_all(table, mesh(30), (), 0.0, 5.0)
    first = {link.node_id for link in table.links()}
    measure_all(table, mesh(30), (), TURN_SECONDS, TURN_SECONDS + 5)
    second = {link.node_id for link in table.links()}
    assert first < second
    assert len(second) == len(first) + MAX_OTHERS
    assert table.next(mesh(1), (), TURN_SECONDS + 10, busy=False) is None
    assert [link.node_id for link in table.links()] == [TRACKER]


def test_a_stub_is_no_neighbour_of_a_real_node() -> None:
    topology = models.topology(models.node("a", (0, 12)), models.node("s", (0, 12), stub=True))
    done = measure_all(LinkTable("a"), topology, (), 0.0, 5.0)
    assert [measurement.node_id for _, measurement in done] == [TRACKER]


@given(
    st.integers(1, 60),
    st.lists(st.integers(0, 70).map("n{:02}".format), unique=True, max_size=20),
    st.lists(st.floats(0, 5000), max_size=8).map(sorted),
)
def test_links_are_few_of_others_and_each_once(num_nodes: int, used: list[str], times: list[float]) -> None:
    table, topology = LinkTable("n00"), mesh(num_nodes)
    used = [node_id for node_id in used if node_id != "n00"]
    for now in times:
        measure_all(table, topology, used, now, now + 6)
    ids = [link.node_id for link in table.links()]
    assert len(ids) == len(set(ids)) <= MAX_LINKS
    assert set(ids) <= {TRACKER, *topology.nodes} - {"n00"}
    if times:
        assert ids[: 1 + MAX_USED][1:] or num_nodes == 1
