"""Calls of tools in text: what is found, however it is cut, and that what grammars allow is found."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gateway.grammars import json_grammar
from services.gateway.tools.calls import Call, ToolsAsked
from services.gateway.tools.conventions import ARGS, CALL_ID, CALLS, CLOSE, OPEN, PYTHON_TAG, Writing
from services.gateway.tools.grammar import MAX_CALLS, calls_grammar
from services.gateway.tools.parser import CallParser

F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {"t": "</tool_call> } ] \\" é"}}'
L = '{"name": "f", "parameters": {"a": 1}}'
CALL_F, CALL_G = ("f", '{"a": 1}'), ("g", '{"t": "</tool_call> } ] \\" é"}')
NAMES = ("f", "g")


def found(writing: Writing, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(writing, NAMES)
    all_found = [one for piece in pieces for one in parser.push(piece)] + parser.finish()
    calls = [one for one in all_found if isinstance(one, Call)]
    assert [call.index for call in calls] == list(range(parser.num_calls))
    text = "".join(one for one in all_found if isinstance(one, str))
    return text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("writing", "text", "content", "calls"),
    [
        (Writing.HERMES, "just text <tool", "just text <tool", []),
        (Writing.HERMES, " text \n", " text \n", []),
        (Writing.HERMES, f"{OPEN}\n{F}\n{CLOSE}", "", [CALL_F]),
        (Writing.HERMES, f"Look.\n\n{OPEN}\n{F}\n{CLOSE}\n{OPEN}{G}{CLOSE}\n", "Look.", [CALL_F, CALL_G]),
        (Writing.HERMES, f"{OPEN}{F}", "", [CALL_F]),
        (Writing.HERMES, f"{OPEN}{F}</tool_", "", [CALL_F]),
        (Writing.HERMES, f"{OPEN}{F}{CLOSE} and so on", " and so on", [CALL_F]),
        (Writing.HERMES, f"{OPEN}{F[:-1]}", f"{OPEN}{F[:-1]}", []),
        (Writing.HERMES, f"{OPEN} no {CLOSE}", f"{OPEN} no {CLOSE}", []),
        (Writing.HERMES, f"{OPEN} {OPEN}{F}{CLOSE}", OPEN, [CALL_F]),
        (Writing.HERMES, OPEN + '{"name": 5}' + CLOSE, OPEN + '{"name": 5}' + CLOSE, []),
        (Writing.HERMES, OPEN + F.replace("1", "NaN"), OPEN + F.replace("1", "NaN"), []),
        (Writing.HERMES, OPEN + F.replace("1", "1e999"), OPEN + F.replace("1", "1e999"), []),
        (Writing.HERMES, OPEN + '{"name": "f"}' + CLOSE, "", [("f", "{}")]),
        (Writing.HERMES, OPEN + '{"name": "f", "arguments": {"a": "\\ud800"}}', "", [("f", '{"a": "\\ud800"}')]),
        (Writing.HERMES, F, F, []),
        (Writing.MISTRAL, f"{CALLS}[{F}, {G}]", "", [CALL_F, CALL_G]),
        (Writing.MISTRAL, f"So: {CALLS} [{F}]\n", "So:", [CALL_F]),
        (Writing.MISTRAL, f"{CALLS}[{F}, 5]", f"{CALLS}[{F}, 5]", []),
        (Writing.MISTRAL, f"{CALLS}[]", f"{CALLS}[]", []),
        (Writing.MISTRAL_ARGS, f'{CALLS}f{ARGS}{{"a": 1}}{CALLS}g{CALL_ID}abc{ARGS}{{}}', "", [CALL_F, ("g", "{}")]),
        (Writing.MISTRAL_ARGS, f"{CALLS}f g{ARGS}{{}}", f"{CALLS}f g{ARGS}{{}}", []),
        (Writing.MISTRAL_ARGS, f"{CALLS}f{ARGS}5", f"{CALLS}f{ARGS}5", []),
        (Writing.MISTRAL_ARGS, f"{CALLS}f", f"{CALLS}f", []),
        (Writing.LLAMA, L, "", [CALL_F]),
        (Writing.LLAMA, f" {PYTHON_TAG}{L}; {L}", "", [CALL_F, CALL_F]),
        (Writing.LLAMA, f"{L}; no", "; no", [CALL_F]),
        (Writing.LLAMA, '{"name": "Bob", "parameters": {}} is JSON', '{"name": "Bob", "parameters": {}} is JSON', []),
        (Writing.LLAMA, '{"name": "f"}', '{"name": "f"}', []),
        (Writing.LLAMA, f"Text {L}", f"Text {L}", []),
        (Writing.LLAMA, L[:-1], L[:-1], []),
    ],
)  # fmt: skip
def test_calls_are_found_and_the_rest_is_content(writing: Writing, text: str, content: str, calls: Any) -> None:
    assert found(writing, text) == (content, calls)
    # A character at a time.
    assert found(writing, *text) == (content, calls)


FRAGMENTS = [
    F, G, L, OPEN, CLOSE, CALLS, ARGS, CALL_ID, PYTHON_TAG, OPEN + F + CLOSE, f"{CALLS}[{F}]", f"{CALLS}f{ARGS}",
    "{", "}", "[", "]", '"', "\\", "\n", " ", ";", ",", "a", "é", "f" * 300, '{"a": {}}', "<", "tool_call>",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(Writing),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_any_cut_of_the_text_gives_the_same(writing: Writing, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = found(writing, text)
    assert found(writing, *pieces) == whole
    assert found(writing, *text) == whole
    content, calls = whole
    if not calls:
        assert content == text
    for name, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
        assert name


class Bytes:
    """A vocabulary of bytes, and of marks that are special tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256

    def __init__(self, marks: list[str]) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in marks)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.ids = {mark: 257 + index for index, mark in enumerate(marks)}

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())

    def encode(self, text: str) -> list[int]:
        for mark, token in self.ids.items():
            if mark in text:
                before, after = text.split(mark, 1)
                return [*self.encode(before), token, *self.encode(after)]
        return list(text.encode())


TOOLS: Any = tuple(
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("f", {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}),
        ("g", None),
    )
)
WRITTEN = {
    Writing.HERMES: (f'{OPEN}\n{F}\n{CLOSE}\n{OPEN}\n{{"name": "g", "arguments": {{}}}}\n{CLOSE}', [OPEN, CLOSE]),
    Writing.MISTRAL: (f'{CALLS}[{F}, {{"name": "g", "arguments": {{}}}}]', [CALLS]),
    Writing.MISTRAL_ARGS: (f'{CALLS}f{ARGS}{{"a": 1}}{CALLS}g{ARGS}{{}}', [CALLS, ARGS]),
    Writing.LLAMA: (L, []),
}


def matched(asked: ToolsAsked, writing: Writing, text: str, marks: list[str], content: Any = None) -> bool:
    """Whether the grammar allows a whole text."""
    vocabulary: Any = Bytes(marks)
    grammar = calls_grammar(writing, asked, vocabulary.ids, content)
    matcher = LLMatcher(LLTokenizer(vocabulary, slices=[]), LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = vocabulary.encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("writing", Writing)
def test_what_the_grammar_allows_is_what_is_found(writing: Writing, are_special: bool) -> None:
    text, marks = WRITTEN[writing]
    marks = marks if are_special else []
    asked = ToolsAsked(TOOLS, ("f", "g"), must_call=True)
    assert matched(asked, writing, text, marks)
    content, calls = found(writing, text)
    assert (content, calls[0]) == ("", CALL_F)
    assert not matched(asked, writing, "hello", marks)
    assert not matched(asked, writing, text.replace('"a"', '"b"'), marks)
    only_g = ToolsAsked(TOOLS, ("g",), must_call=True)
    assert not matched(only_g, writing, text, marks)
    if writing is not Writing.LLAMA:
        assert len(calls) == 2
        assert not matched(ToolsAsked(TOOLS, ("f", "g"), must_call=True, is_parallel=False), writing, text, marks)
    either = json_grammar({"enum": ["hello"]}, "response_format")
    assert matched(asked, writing, '"hello"', marks, either)
    assert matched(asked, writing, text, marks, either)


def test_calls_have_an_end() -> None:
    asked = ToolsAsked(TOOLS, ("g",), must_call=True)
    call = f'{OPEN}\n{{"name": "g", "arguments": {{}}}}\n{CLOSE}'
    assert matched(asked, Writing.HERMES, "\n".join([call] * MAX_CALLS), [])
    assert not matched(asked, Writing.HERMES, "\n".join([call] * (MAX_CALLS + 1)), [])
