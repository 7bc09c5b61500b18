"""Grammars of answers that call tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshnet.grammars import GrammarKind
from services.gateway.grammars import ANY_OBJECT, Grammar, quoted, schema_text
from services.gateway.tools.calls import ToolsAsked
from services.gateway.tools.conventions import ARGS, CALLS, CLOSE, OPEN, Writing

# So that an answer of calls has an end.
MAX_CALLS = 16
LINE_BREAK = quoted("\n")


def calls_grammar(
    writing: Writing, asked: ToolsAsked, marker_ids: Mapping[str, int], content: Grammar | None = None
) -> Grammar:
    """Calls of the tools that may be called; or, if it is given, the content, which must be JSON.

    `marker_ids`: those of the marks that are special tokens of the vocabulary.
    """
    functions = [tool["function"] for tool in asked.tools if tool["function"]["name"] in asked.callable_names]
    lines = [f"start: {'calls | content' if content else 'calls'}"]
    if content:
        lines.append(f"content: %json {content.text}")
    lines += _calls(writing, {mark: _mark(mark, marker_ids) for mark in (OPEN, CLOSE, CALLS, ARGS)}, asked.is_parallel)
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        lines.append(f"call_{index}: {_call(writing, function['name'], index, marker_ids)}")
        lines.append(f"arguments_{index}: %json {schema_text(_schema(function))}")
    return Grammar(GrammarKind.LARK, "\n".join(lines), "tools")


def _calls(writing: Writing, marks: Mapping[str, str], is_parallel: bool) -> list[str]:

    def several(one: str, between: str) -> str:
        return f"{one} ({between} {one}){{0,{MAX_CALLS - 1}}}" if is_parallel else one

    match writing:
        case Writing.HERMES:
            one = f'{marks[OPEN]} "\\n" call "\\n" {marks[CLOSE]}'
            return [f"calls: {several('one', LINE_BREAK)}", f"one: {one}"]
        case Writing.MISTRAL:
            calls = several("call", quoted(", "))
            return [f'calls: {marks[CALLS]} "[" {calls} "]"']
        case Writing.MISTRAL_ARGS:
            return [f"calls: {several('one', '')}", f"one: {marks[CALLS]} call"]
        case Writing.LLAMA:
            # It knows no calls at once.
            return ["calls: call"]


def _call(writing: Writing, name: str, index: int, marker_ids: Mapping[str, int]) -> str:
    if writing is Writing.MISTRAL_ARGS:
        return f"{quoted(name)} {_mark(ARGS, marker_ids)} arguments_{index}"
    key = "parameters" if writing is Writing.LLAMA else "arguments"
    head = '{"name": ' + quoted(name) + f', "{key}": '
    return f'{quoted(head)} arguments_{index} "}}"'


def _mark(mark: str, marker_ids: Mapping[str, int]) -> str:
    """Special tokens are named by their ids."""
    return f"<[{marker_ids[mark]}]>" if mark in marker_ids else quoted(mark)


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**ANY_OBJECT, **parameters}
