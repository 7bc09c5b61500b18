from __future__ import annotations

from itertools import count

import pytest

from meshnet.directive import DirectiveKind, DirectiveState
from meshnet.errors import InvalidRequest
from meshnet.model import LayerRange, Quantization
from services.tracker.directives import Ledger
from services.tracker.placement import Draft

READY, LOADING, ACCEPTED = DirectiveState.READY, DirectiveState.LOADING, DirectiveState.ACCEPTED
DROPPED, FAILED = DirectiveState.DROPPED, DirectiveState.FAILED


def draft(node_id: str = "n1", kind: DirectiveKind = DirectiveKind.LOAD_SHARD) -> Draft:
    return Draft(node_id, kind, "m", LayerRange(0, 5), Quantization.INT8, "because", revision="r", kv_tokens=7)


def make_ledger(history: int = 1000) -> Ledger:
    ids = count(1)
    return Ledger(lambda: f"d{next(ids)}", history)


def test_issued_directives_are_open_in_order() -> None:
    ledger = make_ledger()
    first, second = ledger.issue([draft("n1"), draft("n2")], 3)
    assert (first.directive_id, first.plan_version, first.reason) == ("d1", 3, "because")
    assert (first.revision, first.kv_tokens, first.quantization) == ("r", 7, Quantization.INT8)
    assert ledger.all() == (first, second)
    assert ledger.open("n1") == (first,)
    assert ledger.open("n2") == (second,)
    assert ledger.all("n1") == (first,)


def test_a_load_goes_from_pending_to_ready() -> None:
    ledger = make_ledger()
    ledger.issue([draft()], 1)
    ledger.report("n1", "d1", ACCEPTED)
    assert ledger.report("n1", "d1", LOADING, bytes_done=1, bytes_total=9).bytes_done == 1
    assert ledger.report("n1", "d1", LOADING, bytes_done=5, bytes_total=9).bytes_done == 5
    assert ledger.report("n1", "d1", READY, bytes_done=9, bytes_total=9).state is READY
    assert ledger.open("n1") == ()
    assert len(ledger.all()) == 1


def test_a_report_that_comes_twice_changes_nothing() -> None:
    ledger = make_ledger()
    ledger.issue([draft(kind=DirectiveKind.DROP_SHARD)], 1)
    once = ledger.report("n1", "d1", DROPPED)
    assert ledger.report("n1", "d1", DROPPED) == once


@pytest.mark.parametrize(("node_id", "directive_id"), [("n2", "d1"), ("n1", "d9")])
def test_a_directive_of_nobody_or_of_another_is_refused(node_id: str, directive_id: str) -> None:
    ledger = make_ledger()
    ledger.issue([draft()], 1)
    with pytest.raises(InvalidRequest, match="has no directive"):
        ledger.report(node_id, directive_id, READY)


def test_steps_off_the_table_are_refused_and_change_nothing() -> None:
    ledger = make_ledger()
    ledger.issue([draft()], 1)
    with pytest.raises(InvalidRequest, match="cannot go from PENDING to DROPPED"):
        ledger.report("n1", "d1", DROPPED)
    ledger.report("n1", "d1", FAILED, failure="no memory")
    with pytest.raises(InvalidRequest, match="cannot go from FAILED to READY"):
        ledger.report("n1", "d1", READY)
    assert ledger.all()[0].failure == "no memory"


def test_a_lost_node_fails_its_open_directives_only() -> None:
    ledger = make_ledger()
    ledger.issue([draft(), draft(), draft("n2")], 1)
    ledger.report("n1", "d1", READY)
    assert [d.directive_id for d in ledger.fail_node("n1", "the node was lost")] == ["d2"]
    assert [d.state for d in ledger.all()] == [READY, FAILED, DirectiveState.PENDING]
    assert ledger.all()[1].failure == "the node was lost"


def test_only_finished_directives_are_forgotten_oldest_first() -> None:
    ledger = make_ledger(history=2)
    ledger.issue([draft() for _ in range(5)], 1)
    for directive_id in ("d2", "d1"):
        ledger.report("n1", directive_id, READY)
    assert len(ledger.all()) == 5
    ledger.report("n1", "d4", READY)
    assert [d.directive_id for d in ledger.all()] == ["d1", "d3", "d4", "d5"]
    assert [d.directive_id for d in ledger.open("n1")] == ["d3", "d5"]
