from __future__ import annotations

from services.tracker.settling import Settling


def test_a_first_start_does_not_pause() -> None:
    settling = Settling(0.0, 8.0)
    settling.joined("n1", brings_layers=False, now=1.0)
    assert not settling.pauses(1.0)
    assert not settling.is_due(9.0)


def test_it_pauses_from_the_start_until_all_expected_nodes_are_back() -> None:
    settling = Settling(0.0, 8.0, ["n1", "n2"])
    assert settling.pauses(0.0)
    settling.joined("new", brings_layers=False, now=0.5)
    settling.joined("n1", brings_layers=True, now=1.0)
    assert settling.pauses(1.0)
    settling.joined("n2", brings_layers=False, now=2.0)
    assert not settling.pauses(2.0)
    assert settling.is_due(2.0)
    settling.placed()
    assert not settling.is_due(3.0)


def test_it_does_not_wait_for_ever() -> None:
    settling = Settling(100.0, 8.0, ["n1", "n2"])
    settling.joined("n1", brings_layers=True, now=101.0)
    assert settling.pauses(107.9)
    assert not settling.pauses(108.0)
    assert settling.is_due(108.0)


def test_a_stranger_with_layers_keeps_it_from_ending_early() -> None:
    settling = Settling(0.0, 8.0, ["n1"])
    settling.joined("stranger", brings_layers=True, now=1.0)
    settling.joined("n1", brings_layers=True, now=2.0)
    assert settling.pauses(7.9)
    assert settling.is_due(8.0)


def test_a_stranger_with_layers_begins_it() -> None:
    settling = Settling(0.0, 8.0)
    settling.joined("stranger", brings_layers=True, now=1.0)
    assert settling.pauses(1.0)
    late = Settling(0.0, 8.0)
    late.joined("stranger", brings_layers=True, now=8.0)
    assert not late.pauses(8.0)
