"""Session accounting: positions, room, and that every block is counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import KvFull, PositionMismatch
from meshnet.model import BLOCK_TOKENS, LayerRange
from meshnet.wire import Prefix
from services.node.core.kv_ledger import KvLedger
from services.node.core.sessions import Piece, SessionTable
from services.node.core.work import FreeWork, KeepWork, ReuseWork, SessionKey

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


def kept(sessions: SessionTable, name: str, tokens: int, now: float = 0, entry: str | None = None) -> None:
    """A session that has ended and left its whole blocks."""
    sessions.accept([Piece(key(name), 0, tokens)], first_chunk=True, now=now, entry=entry)
    sessions.keep(key(name), tokens, now)
    sessions.take_works()
    sessions.check_integrity()


def test_what_is_kept_is_free_room_and_no_session() -> None:
    sessions = table()
    kept(sessions, "a", 300)
    assert (len(sessions), sessions.num_kept, sessions.kept_length(key("a"))) == (0, 1, 256)
    assert sessions.free_tokens() == 1024
    assert sessions.ledger("m").kept_tokens == 256
    assert sessions.keys_through("m", LAYERS) == ()
    assert sessions.kept_through("m", LAYERS) == sessions.keys_of("a") == (key("a"),)
    assert sessions.idle_since(1e9) == ()
    assert sessions.kept_since(1) == (key("a"),)
    sessions.close([key("a")])
    assert sessions.take_works() == (FreeWork((key("a"),)),)
    assert sessions.num_kept == 0
    sessions.check_integrity()


def test_less_than_a_block_and_what_was_never_cached_is_not_kept() -> None:
    sessions = table()
    for tokens, asked in ((127, 127), (300, 384), (300, 0)):
        sessions.accept([Piece(key(), 0, tokens)], first_chunk=True, now=0)
        sessions.keep(key(), asked, 0)
        assert sessions.take_works() == (FreeWork((key(),)),)
        assert (len(sessions), sessions.num_kept) == (0, 0)
    sessions.keep(key("unknown"), 128, 0)
    assert sessions.take_works() == ()


def test_a_session_takes_over_what_was_kept() -> None:
    sessions = table()
    kept(sessions, "a", 400)
    sessions.open(key("b"), 1024, now=1, prefix=Prefix("a", 384, take=True))
    assert sessions.take_works() == (ReuseWork(key("a"), key("b"), 384, take=True),)
    assert (sessions.length(key("b")), sessions.num_kept, sessions.free_tokens()) == (384, 0, 0)
    assert sessions.accept([Piece(key("b"), 384, 640)], first_chunk=True, now=1) == (384,)
    sessions.check_integrity()


def test_a_copy_leaves_what_was_kept_unless_there_is_no_room_for_both() -> None:
    sessions = table()
    kept(sessions, "a", 512)
    sessions.open(key("b"), 512, now=1, prefix=Prefix("a", 256, take=False))
    assert sessions.take_works() == (ReuseWork(key("a"), key("b"), 256, take=False),)
    assert sessions.kept_length(key("a")) == 512
    sessions.close([key("b")])
    sessions.take_works()
    sessions.open(key("c"), 513, now=1, prefix=Prefix("a", 256, take=False))
    assert sessions.take_works() == (ReuseWork(key("a"), key("c"), 256, take=True),)
    assert sessions.num_kept == 0
    sessions.check_integrity()


def test_the_least_recently_used_is_given_up_first_and_the_source_last() -> None:
    sessions = table()
    for name in "abc":
        kept(sessions, name, 256)
    # Copying from "a" uses it: "b" goes for the room.
    sessions.open(key("d"), 512, now=1, prefix=Prefix("a", 128, take=False))
    assert sessions.take_works() == (FreeWork((key("b"),)), ReuseWork(key("a"), key("d"), 128, take=False))
    sessions.open(key("e"), 128, now=1)
    assert sessions.take_works() == (FreeWork((key("c"),)),)
    assert sessions.kept_length(key("a")) == 256
    sessions.check_integrity()


def test_only_what_the_same_entry_node_left_in_the_same_layers_is_reused() -> None:
    sessions = table()
    kept(sessions, "a", 256, entry="n")
    prefix = Prefix("a", 256, take=True)
    for new, entry, num_tokens in (
        (key("b"), "other", 256),
        (key("b"), None, 256),
        (key("b", LayerRange(0, 2)), "n", 256),
        (SessionKey("b", "another", LAYERS), "n", 256),
        (key("b"), "n", 384),
    ):
        asked = Prefix("a", num_tokens, take=True)
        with pytest.raises(PositionMismatch) as refused:
            sessions.accept([Piece(new, num_tokens, 1)], first_chunk=True, now=0, entry=entry, prefix=asked)
        assert refused.value.cached_length == 0
    assert sessions.take_works() == ()
    assert sessions.accept([Piece(key("b"), 256, 5)], first_chunk=True, now=0, entry="n", prefix=prefix) == (256,)
    # Sent again, it is a frame as any other.
    assert sessions.accept([Piece(key("b"), 256, 5)], first_chunk=True, now=0, entry="n", prefix=prefix) == (256,)
    assert sessions.take_works() == (ReuseWork(key("a"), key("b"), 256, take=True),)


def test_a_running_session_is_copied_from_and_never_taken() -> None:
    sessions = table()
    sessions.accept([Piece(key("a"), 0, 300)], first_chunk=True, now=0)
    sessions.open(key("b"), 300, now=0, prefix=Prefix("a", 256, take=True))
    assert sessions.take_works() == (ReuseWork(key("a"), key("b"), 256, take=False),)
    assert sessions.length(key("a")) == 300
    with pytest.raises(KvFull):
        sessions.open(key("c"), 300, now=0, prefix=Prefix("a", 256, take=False))
    assert key("c") not in sessions
    sessions.check_integrity()


def test_a_session_of_the_same_name_begins_anew() -> None:
    sessions = table()
    kept(sessions, "a", 300)
    with pytest.raises(PositionMismatch):
        sessions.accept([Piece(key("a"), 256, 1)], first_chunk=True, now=0)
    assert sessions.num_kept == 1
    sessions.accept([Piece(key("a"), 0, 5)], first_chunk=True, now=0)
    assert sessions.take_works() == (FreeWork((key("a"),)),)
    assert (sessions.length(key("a")), sessions.num_kept) == (5, 0)
    sessions.check_integrity()


def test_what_is_kept_of_a_nodes_sessions_is_found_with_them() -> None:
    sessions = table()
    kept(sessions, "a", 128, entry="n")
    sessions.accept([Piece(key("b"), 0, 5)], first_chunk=True, now=0, entry="n")
    assert set(sessions.keys_from("n")) == {key("a"), key("b")}
    sessions.close(sessions.keys_from("n"))
    assert sessions.free_tokens() == 1024
    assert sessions.ledger("m").kept_tokens == 0


RANGES = (LAYERS, LayerRange(0, 2), LayerRange(1, 4))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "reserve", "keep", "release", "give_up", "use"]),
            st.sampled_from("abcd"),
            st.sampled_from(RANGES),
            st.integers(1, 700),
        ),
        max_size=40,
    )
)
def test_room_is_refused_only_for_what_sessions_hold(history: list[tuple[str, str, LayerRange, int]]) -> None:
    """Layer by layer, whatever is kept in them and in whatever order it is used."""
    ledger = KvLedger()
    ledger.add_layers(LAYERS, 1024)
    held: dict[SessionKey, int] = {}
    left: list[SessionKey] = []
    for action, session, layers, tokens in history:
        one = key(session, layers)
        blocks = -(-tokens // BLOCK_TOKENS)
        match action:
            case "reserve" if one not in left:
                used = max(sum(n for k, n in held.items() if layer in k.layers) for layer in layers.layers)
                by_layer = {
                    layer: 8 - sum(n for k, n in held.items() if layer in k.layers and k != one)
                    for layer in layers.layers
                }
                fits = blocks <= min(by_layer.values()) or blocks <= held.get(one, 0)
                assert used <= 8
                try:
                    given_up = ledger.reserve(one, tokens)
                except KvFull:
                    assert not fits
                else:
                    assert fits
                    held[one] = max(blocks, held.get(one, 0))
                    # In the order in which they were used last.
                    assert list(given_up) == [k for k in left if k in given_up]
                    left = [k for k in left if k not in given_up]
            case "keep" if one in held:
                ledger.keep(one, min(blocks, held.pop(one)))
                left.append(one)
            case "release":
                ledger.release(one)
                held.pop(one, None)
            case "give_up":
                ledger.give_up(one)
                left = [k for k in left if k != one]
            case "use":
                ledger.use(one)
                left = [k for k in left if k != one] + [k for k in left if k == one]
        ledger.check_integrity()
    for one in held:
        ledger.release(one)
    assert ledger.free_tokens == 1024
    ledger.check_integrity()


def test_works_are_taken_once() -> None:
    sessions = table()
    sessions.accept([Piece(key("a"), 0, 300)], first_chunk=True, now=0)
    sessions.keep(key("a"), 299, now=0)
    assert sessions.take_works() == (KeepWork(key("a"), 256),)
    assert sessions.take_works() == ()
