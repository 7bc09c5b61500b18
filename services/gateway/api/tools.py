"""Tools in requests: those that may be called, and calls of before."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.api.parsing import out_of_range
from services.gateway.tools.calls import ToolsAsked

MAX_TOOLS = 128
MAX_CALLS = 1024

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Function(_Part):
    """Without parameters it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function

    @property
    def template_fields(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        function.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


class FunctionChoice(_Part):
    name: str


class NamedChoice(_Part):
    type: Literal["function"]
    function: FunctionChoice


class CalledFunction(_Part):
    name: str
    arguments: str


class CallOfBefore(_Part):
    """In an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def template_fields(self) -> dict[str, Any]:
        """The arguments are an object. Raises ValueError for what is none."""
        arguments = json.loads(self.function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004 - as for what is no JSON
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolFields(BaseModel):
    """What a request says of tools."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool = True

    def tools_asked(self) -> ToolsAsked | None:
        """None: none is to be called. Raises ApiError (400)."""
        names = tuple(tool.function.name for tool in self.tools)
        if len(set(names)) < len(names):
            raise out_of_range("tools", "two of them have one name")
        callable_names = names
        if isinstance(self.tool_choice, NamedChoice):
            callable_names = (self.tool_choice.function.name,)
            if callable_names[0] not in names:
                raise out_of_range("tool_choice", f"there is no function {callable_names[0][:80]!r} among 'tools'")
        must_call = self.tool_choice not in {None, "none", "auto"}
        if must_call and not names:
            raise out_of_range("tool_choice", "it needs 'tools'")
        if not names or self.tool_choice == "none":
            return None
        tools = tuple(tool.template_fields for tool in self.tools)
        return ToolsAsked(tools, callable_names, must_call, self.parallel_tool_calls)
