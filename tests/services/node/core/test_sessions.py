"""Session accounting: positions, room, and that every block is counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import KvFull, PositionMismatch
from meshnet.model import BLOCK_TOKENS, LayerRange
from services.node.core.kv_ledger import KvLedger
from services.node.core.sessions import Piece, SessionTable
from services.node.core.work import SessionKey

LAYERS = LayerRange(0, 4)


def key(session: str = "a", layers: LayerRange = LAYERS) -> SessionKey:
    return SessionKey(session, "m", layers)


def table(kv_tokens: int = 1024) -> SessionTable:
    sessions = SessionTable()
    sessions.ledger("m").add_layers(LAYERS, kv_tokens)
    return sessions


def test_a_new_session_begins_at_zero_and_goes_on_where_it_ended() -> None:
    sessions = table()
    assert sessions.accept([Piece(key(), None, 5)], first_chunk=True, now=0) == (0,)
    assert sessions.accept([Piece(key(), None, 1)], first_chunk=True, now=0) == (5,)
    assert sessions.length(key()) == 6


def test_a_gap_is_refused_with_the_cached_length_or_waited_for_if_a_chunk_is_on_its_way() -> None:
    sessions = table()
    sessions.accept([Piece(key(), 0, 5)], first_chunk=True, now=0)
    with pytest.raises(PositionMismatch) as refused:
        sessions.accept([Piece(key(), 9, 1)], first_chunk=True, now=0)
    assert refused.value.cached_length == 5
    assert sessions.accept([Piece(key(), 9, 1)], first_chunk=False, now=0) is None
    assert sessions.length(key()) == 5


def test_an_earlier_position_cuts_the_cache_back() -> None:
    sessions = table()
    sessions.accept([Piece(key(), 0, 100)], first_chunk=True, now=0)
    assert sessions.accept([Piece(key(), 40, 2)], first_chunk=True, now=0) == (40,)
    assert sessions.length(key()) == 42


def test_all_rows_of_a_frame_are_accepted_or_none() -> None:
    sessions = table(kv_tokens=BLOCK_TOKENS)
    with pytest.raises(KvFull):
        sessions.accept([Piece(key("a"), 0, 10), Piece(key("b"), 0, 10)], first_chunk=True, now=0)
    assert len(sessions) == 0
    assert sessions.free_tokens() == BLOCK_TOKENS
    sessions.check_integrity()


def test_room_reserved_at_the_start_is_still_there_for_the_last_token() -> None:
    sessions = table(kv_tokens=512)
    sessions.open(key("a"), 512, now=0)
    with pytest.raises(KvFull):
        sessions.open(key("b"), 1, now=0)
    assert sessions.accept([Piece(key("a"), 0, 512)], first_chunk=True, now=0) == (0,)
    sessions.close([key("a")])
    sessions.open(key("b"), 512, now=0)
    sessions.check_integrity()


def test_idle_sessions_are_found_and_used_ones_are_not() -> None:
    sessions = table()
    sessions.accept([Piece(key("old"), 0, 1)], first_chunk=True, now=10)
    sessions.accept([Piece(key("new"), 0, 1)], first_chunk=True, now=20)
    assert sessions.idle_since(15) == (key("old"),)


def test_a_node_visited_twice_has_two_caches_of_one_session() -> None:
    sessions = table()
    early, late = key(layers=LayerRange(0, 2)), key(layers=LayerRange(2, 4))
    sessions.accept([Piece(early, 0, 3)], first_chunk=True, now=0)
    sessions.accept([Piece(late, 0, 3)], first_chunk=True, now=0)
    assert len(sessions) == 1
    assert set(sessions.keys_of("a")) == {early, late}
    assert sessions.keys_through("m", LayerRange(3, 4)) == (late,)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["accept", "cut", "close", "open"]), st.sampled_from(["a", "b", "c"]), st.integers(1, 400)
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_allocated_and_free_blocks_are_always_the_capacity(operations: list[tuple[str, str, int]]) -> None:
    sessions = table()
    for operation, session, tokens in operations:
        try:
            if operation == "accept":
                sessions.accept([Piece(key(session), None, tokens)], first_chunk=True, now=0)
            elif operation == "cut":
                sessions.accept([Piece(key(session), 0, tokens)], first_chunk=True, now=0)
            elif operation == "open":
                sessions.open(key(session), tokens, now=0)
            else:
                sessions.close([key(session)])
        except KvFull:
            pass
        sessions.check_integrity()
    sessions.close([key(session) for session in "abc"])
    assert sessions.free_tokens() == 1024
    sessions.check_integrity()


def test_layers_bring_room_and_take_it_away() -> None:
    ledger = KvLedger()
    ledger.add_layers(LayerRange(0, 2), 256)
    ledger.add_layers(LayerRange(5, 6), 256)
    assert ledger.capacity_tokens == 256
    ledger.remove_layers(LayerRange(0, 2))
    assert ledger.free_tokens == 256
    ledger.remove_layers(LayerRange(5, 6))
    assert ledger.free_tokens == 0
    ledger.check_integrity()


def test_room_is_counted_layer_by_layer() -> None:
    """Sessions through some of the layers leave the others' room as it was, and cannot borrow it."""
    ledger = KvLedger()
    ledger.add_layers(LAYERS, 256)
    ledger.reserve(key("a", LayerRange(0, 2)), 256)
    assert ledger.free_tokens == 0
    with pytest.raises(KvFull):
        ledger.reserve(key("b", LayerRange(1, 3)), 1)
    ledger.reserve(key("c", LayerRange(2, 4)), 256)
    ledger.check_integrity()
    ledger.release(key("a", LayerRange(0, 2)))
    ledger.release(key("c", LayerRange(2, 4)))
    assert ledger.free_tokens == 256
    ledger.check_integrity()
