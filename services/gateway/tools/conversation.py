"""Conversations with tools, as chat templates take them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.tools.conventions import CLOSE, OPEN, Convention, Writing

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` and `tools` as Hugging Face's templates take them: the arguments of calls are objects."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()

    @property
    def num_chars(self) -> int:
        """Of all that a template may write, at least."""
        content = sum(len(message.get("content") or "") for message in self.messages)
        return content + (len(json.dumps(self.tools, ensure_ascii=False)) if self.tools else 0)


def adapted(conversation: Conversation, convention: Convention) -> Conversation:
    """For a template of that convention."""
    if not convention.is_native:
        return _in_words(conversation, takes_no_system=convention.takes_no_system)
    if convention.writing in {Writing.MISTRAL, Writing.MISTRAL_ARGS}:
        conversation = Conversation(tuple(map(_with_short_ids, conversation.messages)), conversation.tools)
    if convention.writing is Writing.LLAMA:
        conversation = Conversation(_one_call_at_once(conversation.messages), conversation.tools)
    return with_arguments_as_text(conversation) if convention.has_text_arguments else conversation


def with_arguments_as_text(conversation: Conversation) -> Conversation:
    """As some templates want them."""
    return Conversation(tuple(map(_as_text, conversation.messages)), conversation.tools)


def _as_text(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _in_words(conversation: Conversation, *, takes_no_system: bool) -> Conversation:
    """Hermes' way, for templates that know no tools: calls and results are parts of what was said."""
    messages: list[Message] = []
    for message in conversation.messages:
        if message["role"] != "tool":
            messages.append(_called(message))
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if messages and messages[-1].get("is_result"):
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n{result}"}
        else:
            messages.append({"role": "user", "content": result, "is_result": True})
    plain = [{name: value for name, value in message.items() if name != "is_result"} for message in messages]
    if not conversation.tools:
        return Conversation(tuple(plain))
    told = _SYSTEM.format(tools="\n".join(map(_json, conversation.tools)))
    role = "system"
    if takes_no_system and plain and plain[0]["role"] == "user":
        role, told, plain = "user", f"{told}\n\n{plain[0]['content']}", plain[1:]
    elif plain and plain[0]["role"] == "system":
        told, plain = f"{plain[0]['content']}\n\n{told}", plain[1:]
    return Conversation(({"role": role, "content": told}, *plain))


def _called(message: Message) -> Message:
    calls = [
        f"{OPEN}\n{_json({'name': call['function']['name'], 'arguments': call['function']['arguments']})}\n{CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    return {
        "role": message["role"],
        "content": "\n".join([message["content"], *calls] if message["content"] else calls),
    }


def _one_call_at_once(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Llama's templates refuse a message of several calls: each has its own, with its result behind it."""
    found: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            call = next((one for one in waiting if _is_result(message, one)), None)
            found += [message] if call is None else [call, message]
            waiting = [one for one in waiting if one is not call]
            continue
        found += waiting
        calls = message.get("tool_calls", ())
        waiting = [{**message, "tool_calls": [call], "content": ""} for call in calls[1:]]
        found.append({**message, "tool_calls": calls[:1]} if waiting else message)
    return (*found, *waiting)


def _is_result(message: Message, called: Message) -> bool:
    return any(call["id"] == message["tool_call_id"] for call in called["tool_calls"])


def _with_short_ids(message: Message) -> Message:
    """Mistral's templates refuse ids that are not of nine letters and digits."""
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": [{**call, "id": _short(call["id"])} for call in calls]}
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(call_id: str) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
