from __future__ import annotations

from collections.abc import Sequence

from services.gateway.text_output import LENGTH, STOP, TextOutput


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def push_all(output: TextOutput, text: bytes) -> str:
    return "".join(output.push(token_id) for token_id in text)


def test_a_stop_token_ends_the_text_and_is_counted_but_not_shown() -> None:
    output = TextOutput(decode, [0])
    assert push_all(output, b"ab") + output.push(0) == "ab"
    assert (output.finish_reason, output.num_tokens) == (STOP, 3)


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    output = TextOutput(decode, (), ["bcd"])
    assert push_all(output, b"abc") == "a"
    assert output.finish(LENGTH) == "bc"
    assert output.finish_reason == LENGTH


def test_a_stop_string_that_only_the_flush_completes_is_found() -> None:
    output = TextOutput(decode, (), ["\N{REPLACEMENT CHARACTER}"])
    assert push_all(output, b"a\xf0") + output.finish(LENGTH) == "a"
    assert output.finish_reason == STOP


def test_once_ended_it_stays_as_it_is() -> None:
    output = TextOutput(decode, (), ["b"])
    assert push_all(output, b"ab") == "a"
    assert output.finish(LENGTH) == ""
    assert output.finish_reason == STOP
