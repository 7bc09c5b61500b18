"""The life of a directive: only what the table allows, and a final state is final."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.directive import TRANSITIONS, Directive, DirectiveKind, DirectiveState
from meshnet.errors import InvalidRequest
from meshnet.model import LayerRange

S = DirectiveState


def directive(kind: DirectiveKind) -> Directive:
    return Directive("d", "n", kind, "m", LayerRange(0, 4), 1, "why")


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (DirectiveKind.LOAD_SHARD, [S.ACCEPTED, S.LOADING, S.LOADING, S.READY]),
        (DirectiveKind.LOAD_SHARD, [S.FAILED]),
        (DirectiveKind.DROP_SHARD, [S.ACCEPTED, S.DROPPED]),
    ],
)
def test_the_usual_lives(kind: DirectiveKind, path: list[S]) -> None:
    current = directive(kind)
    for state in path:
        current = current.advance(state, bytes_done=5)
    assert current.state.is_final
    assert current.bytes_done == 5


@given(st.sampled_from(DirectiveKind), st.lists(st.sampled_from(DirectiveState), max_size=8))
def test_what_the_table_forbids_raises_and_changes_nothing(kind: DirectiveKind, path: list[S]) -> None:
    current = directive(kind)
    for state in path:
        before = current
        if state in TRANSITIONS.get((kind, current.state), frozenset()):
            current = current.advance(state)
            assert current.state is state
        else:
            with pytest.raises(InvalidRequest):
                current.advance(state)
            assert current == before


def test_final_states_are_the_ones_without_a_way_out() -> None:
    assert {state for state in S if state.is_final} == {S.READY, S.DROPPED, S.FAILED}
