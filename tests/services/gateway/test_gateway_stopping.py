from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stopping import StopStrings

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    stopping = StopStrings(stops)
    text = "".join(stopping.push(chunk) for chunk in chunks)
    return text + stopping.flush(), stopping.found


@given(st.text("ab", min_size=1, max_size=4), st.lists(LETTERS))
def test_one_stop_string_cuts_where_find_finds_it(stop: str, chunks: list[str]) -> None:
    text = "".join(chunks)
    before, found, _ = text.partition(stop)
    assert run([stop], chunks) == (before, stop if found else None)


@given(STOPS, st.lists(LETTERS))
def test_the_result_does_not_depend_on_the_chunks(stops: list[str], chunks: list[str]) -> None:
    assert run(stops, chunks) == run(stops, ["".join(chunks)]) == run(stops, list("".join(chunks)))


@given(STOPS, LETTERS)
def test_what_is_passed_on_never_has_to_be_taken_back(stops: list[str], text: str) -> None:
    stopping = StopStrings(stops)
    passed = ""
    for letter in text:
        passed += stopping.push(letter)
        assert run(stops, [text])[0].startswith(passed)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stopping = StopStrings(["STOP"])
    assert stopping.push("Hello ST") == "Hello "
    assert stopping.push("ART") == "START"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["b", "abc"], "xabc", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["é"], "cafés", "caf"),
        (["\n\n"], "a\n\n\nb", "a"),
        ([], "abc", "abc"),
    ],
)
def test_of_several_the_first_complete_and_then_the_longest_counts(stops: list[str], text: str, expected: str) -> None:
    assert run(stops, [text])[0] == expected


def test_after_a_stop_string_nothing_is_passed_on() -> None:
    stopping = StopStrings(["."])
    assert [stopping.push("a.b"), stopping.push("c"), stopping.flush()] == ["a", "", ""]
