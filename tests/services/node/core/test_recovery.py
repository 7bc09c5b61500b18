"""Which failures a generation outlives, and what it avoids after them."""

from __future__ import annotations

import pytest

from meshnet.errors import (
    BrokenNode,
    InvalidRequest,
    KvFull,
    MeshnetError,
    NextHopFailed,
    NextHopTimeout,
    PositionMismatch,
)
from services.node.core.recovery import AVOID_SECONDS, MAX_ATTEMPTS, Recovery, rest_of
from services.node.core.request import GenerationRequest

TIMEOUT = 60.0


@pytest.mark.parametrize("kind", [NextHopFailed, NextHopTimeout])
def test_a_node_that_failed_is_avoided_for_a_while(kind: type[NextHopFailed]) -> None:
    recovery = Recovery(TIMEOUT)
    assert recovery.failed(kind("gone", "b"), 100.0, has_begun=True) == 0.0
    assert recovery.failed(kind("gone", "c"), 101.0, has_begun=True) == 0.0
    assert recovery.avoided(102.0) == {"b", "c"}
    assert recovery.avoided(100.0 + AVOID_SECONDS) == {"c"}
    assert recovery.deadline == 100.0 + TIMEOUT


def test_a_token_closes_the_time_that_a_failure_has_opened() -> None:
    recovery = Recovery(TIMEOUT)
    recovery.failed(NextHopFailed("gone", "b"), 0.0, has_begun=True)
    recovery.progressed()
    assert recovery.deadline is None
    recovery.failed(NextHopFailed("gone", "b"), TIMEOUT + 1.0, has_begun=True)
    assert recovery.deadline == 2 * TIMEOUT + 1.0


def test_behind_the_deadline_the_failure_is_the_answer() -> None:
    recovery, error = Recovery(TIMEOUT), NextHopFailed("gone", "b")
    recovery.failed(error, 0.0, has_begun=True)
    with pytest.raises(NextHopFailed, match="gone") as raised:
        recovery.failed(error, TIMEOUT, has_begun=True)
    assert raised.value is error


def test_a_wrong_position_is_tried_once_more() -> None:
    recovery, error = Recovery(TIMEOUT), PositionMismatch("lost", 0)
    assert recovery.failed(error, 0.0, has_begun=True) == 0.0
    with pytest.raises(PositionMismatch):
        recovery.failed(error, 0.0, has_begun=True)
    recovery.progressed()
    assert recovery.failed(error, 0.0, has_begun=True) == 0.0
    assert not recovery.avoided(0.0)


def test_a_hop_without_room_is_waited_for_only_by_those_that_have_begun() -> None:
    recovery, full = Recovery(TIMEOUT), KvFull("no room", 2.5)
    assert recovery.failed(full, 0.0, has_begun=True) == 2.5
    with pytest.raises(KvFull):
        Recovery(TIMEOUT).failed(full, 0.0, has_begun=False)


@pytest.mark.parametrize("error", [InvalidRequest("not finite"), MeshnetError("of this node")])
def test_what_is_no_hops_failure_ends_a_generation(error: MeshnetError) -> None:
    with pytest.raises(type(error)):
        Recovery(TIMEOUT).failed(error, 0.0, has_begun=True)


def test_values_that_two_nodes_cannot_compute_are_nobodys_fault() -> None:
    recovery = Recovery(TIMEOUT)
    assert recovery.failed(BrokenNode("not finite", "b"), 0.0, has_begun=True) == 0.0
    assert recovery.failed(BrokenNode("not finite", "b"), 1.0, has_begun=True) == 0.0
    recovery.progressed()
    with pytest.raises(BrokenNode):
        recovery.failed(BrokenNode("not finite", "c"), 2.0, has_begun=True)


def test_attempts_without_a_token_come_to_an_end() -> None:
    recovery = Recovery(TIMEOUT)
    for _ in range(MAX_ATTEMPTS - 1):
        recovery.failed(NextHopFailed("gone", "b"), 0.0, has_begun=True)
    with pytest.raises(NextHopFailed):
        recovery.failed(NextHopFailed("gone", "b"), 0.0, has_begun=True)


def test_the_rest_of_a_generation() -> None:
    request = GenerationRequest("r", "m", (1, 2, 3), 10, seed=7, min_new_tokens=4, prompt_logprobs=True)
    rest = rest_of(request, [4, 5], "s", has_begun=True)
    assert rest == GenerationRequest("s", "m", (1, 2, 3, 4, 5), 8, seed=7, min_new_tokens=4, num_generated=2)
    assert rest_of(request, [], "s", has_begun=False).prompt_logprobs
