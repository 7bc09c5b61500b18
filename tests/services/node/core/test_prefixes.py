"""The table of prefixes: names, what is found by them, and what is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshnet.model import LayerRange
from meshnet.topology import Hop
from services.node.core.prefixes import PrefixTable
from services.node.core.work import SessionKey

ROUTES = tuple((Hop("a", LayerRange(0, 2)), Hop(last, LayerRange(2, 4))) for last in "bc")
BLOCKS = [tuple(range(start, start + 128)) for start in (0, 1000, 2000)]


def key(session: str, model_id: str = "m") -> SessionKey:
    return SessionKey(session, model_id, LayerRange(0, 2))


def text(*blocks: int) -> tuple[int, ...]:
    return tuple(token for block in blocks for token in BLOCKS[block])


def test_a_name_stands_for_all_tokens_up_to_its_end() -> None:
    table = PrefixTable(b"secret")
    first, second = table.names("m", text(0, 1)), table.names("m", (*text(0, 2), 5, 6))
    assert (len(first), len(second)) == (2, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert table.names("m", text(2, 1))[1] != first[1]
    assert table.names("m", text(0)[:127]) == ()


def test_models_and_nodes_have_names_of_their_own() -> None:
    table = PrefixTable(b"secret")
    mine = table.names("m", text(0, 1))
    assert not set(mine) & set(table.names("other", text(0, 1)))
    assert not set(mine) & set(PrefixTable(b"another").names("m", text(0, 1)))
    assert mine == PrefixTable(b"secret").names("m", text(0, 1))


def test_the_longest_is_found_and_a_whole_one_before_one_that_has_more() -> None:
    table = PrefixTable(b"")
    names = table.names("m", text(0, 1, 2))
    table.put(key("short"), ROUTES[0], names[:1])
    table.put(key("long"), ROUTES[0], names)
    match = table.find(ROUTES[0], table.names("m", (*text(0, 1), *text(0))))
    assert match
    assert (match.key, match.num_tokens, match.is_whole) == (key("long"), 256, False)
    match = table.find(ROUTES[0], names[:1])
    assert match
    assert (match.key, match.num_tokens, match.is_whole) == (key("short"), 128, True)
    assert table.find(ROUTES[1], names) is None
    assert table.find(ROUTES[0], table.names("m", text(1))) is None
    assert table.find(ROUTES[0], ()) is None


def test_what_is_put_anew_replaces_what_was() -> None:
    table = PrefixTable(b"")
    table.put(key("a"), ROUTES[0], table.names("m", text(0, 1)))
    table.put(key("a"), ROUTES[1], table.names("m", text(2)))
    assert table.find(ROUTES[0], table.names("m", text(0, 1))) is None
    table.put(key("a"), ROUTES[1], ())
    assert len(table) == 0
    table.check_integrity()


HISTORY = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(ROUTES),
        st.lists(st.integers(0, 1), max_size=4),
        st.sampled_from(["put", "put", "forget"]),
    ),
    max_size=30,
)


@given(HISTORY, st.lists(st.integers(0, 1), max_size=4))
def test_what_is_found_is_always_the_longest_that_there_is(
    history: list[tuple[str, tuple[Hop, ...], list[int], str]], wanted: list[int]
) -> None:
    table, left = PrefixTable(b"s"), dict[str, tuple[tuple[Hop, ...], list[int]]]()
    for session, route, blocks, action in history:
        left.pop(session, None)
        if action == "put":
            table.put(key(session), route, table.names("m", text(*blocks)))
            if blocks:
                left[session] = (route, blocks)
        else:
            table.forget(key(session))
        table.check_integrity()
        assert {known.session for known in table.keys} == left.keys()
    for route in ROUTES:
        common = {session: _in_common(blocks, wanted) for session, (r, blocks) in left.items() if r == route}
        longest = max(common.values(), default=0)
        match = table.find(route, table.names("m", text(*wanted)))
        if not longest:
            assert match is None
            continue
        assert match
        assert match.num_tokens == 128 * longest == 128 * common[match.key.session]
        assert match.is_whole == any(left[s][1] == wanted[:longest] for s, n in common.items() if n == longest)


def _in_common(blocks: list[int], wanted: list[int]) -> int:
    count = 0
    while count < min(len(blocks), len(wanted)) and blocks[count] == wanted[count]:
        count += 1
    return count
