"""How a model writes calls, by trial: what its chat template makes of one.

Templates have many ways to come to the same text, and words of one way may stand in a template of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.gateway.tools.calls import Call
from services.gateway.tools.conventions import ARGS, Convention, Writing
from services.gateway.tools.conversation import Conversation, with_arguments_as_text
from services.gateway.tools.parser import CallParser

# The text of a conversation, up to where the next answer begins. Raises what templates raise.
Render = Callable[[Conversation], str]

_NAME, _CALL_ID, _ASKED, _TOLD, _RESULT = "trial_function", "trial0000", "trial asked", "trial told", "trial result"
_USER = {"role": "user", "content": _ASKED}
_FUNCTION = {"name": _NAME, "description": _TOLD, "parameters": {"type": "object", "properties": {}}}
_TOOLS = ({"type": "function", "function": _FUNCTION},)
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {"key": "value"}}}
_CALLED = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": _RESULT, "tool_call_id": _CALL_ID, "name": _NAME},
)


def convention_of(render: Render) -> Convention:
    """Where a template knows no tools, or writes calls in a way unknown here, Hermes' is written into messages."""
    for has_text_arguments in (False, True):
        called = Conversation(_CALLED, _TOOLS)
        writing = _writing(render, with_arguments_as_text(called) if has_text_arguments else called)
        if writing is not None:
            return Convention(writing, is_native=True, has_text_arguments=has_text_arguments)
    return Convention(Writing.HERMES, is_native=False, takes_no_system=_takes_no_system(render))


def _writing(render: Render, called: Conversation) -> Writing | None:
    try:
        before, shown = render(Conversation((_USER,), _TOOLS)), render(called)
    except Exception:
        return None
    behind = shown.rpartition(_ASKED)[2]
    if _TOLD not in before or _RESULT not in behind:
        return None
    # Behind what opens an answer; but some templates open it otherwise when it is over.
    common = next((i for i, (one, other) in enumerate(zip(before, shown, strict=False)) if one != other), len(before))
    answer = shown[common:]
    return next((writing for text in (answer, behind) for writing in _writings(text)), None)


def _writings(text: str) -> Iterator[Writing]:
    """Those in which the call is found in a text."""
    for writing in (Writing.HERMES, Writing.MISTRAL_ARGS if ARGS in text else Writing.MISTRAL, Writing.LLAMA):
        parser = CallParser(writing, (_NAME,))
        found = [one for one in parser.push(text) + parser.finish() if isinstance(one, Call)]
        if found == [Call(_NAME, '{"key": "value"}')]:
            yield writing


def _takes_no_system(render: Render) -> bool:
    try:
        render(Conversation((_USER,)))
    except Exception:
        return False
    try:
        return _TOLD not in render(Conversation(({"role": "system", "content": _TOLD}, _USER)))
    except Exception:
        return True
