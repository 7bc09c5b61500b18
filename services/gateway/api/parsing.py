"""From a request's body to a checked model, or to an error that names the field at fault.

A field that is null is a field that is absent, and unknown fields are ignored. What would change the answer and is
not supported is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict

from services.gateway.api_errors import ApiError, invalid

# Fields that are not supported, with the values of theirs that change nothing.
Neutral = Mapping[str, tuple[Any, ...]]


class ApiRequest(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    not_supported: ClassVar[Neutral] = MappingProxyType({})

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """From a request's body. Raises ApiError (400)."""
        fields = _fields(body)
        cls.check_supported(fields)
        try:
            request = cls.model_validate(fields)
        except pydantic.ValidationError as error:
            raise _api_error(error) from None
        request.check_together()
        return request

    @classmethod
    def check_supported(cls, fields: Mapping[str, Any]) -> None:
        """Raises ApiError (400) for a field that is not supported."""
        for name, neutral in cls.not_supported.items():
            if name in fields and not any(_same(fields[name], value) for value in neutral):
                raise unsupported(f"The parameter {name!r} is not supported{_hint(neutral)}.", name)

    def check_together(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""


def unsupported(message: str, param: str) -> ApiError:
    return invalid(message, param, "unsupported_parameter")


def out_of_range(param: str, reason: str) -> ApiError:
    return invalid(f"Invalid value for {param!r}: {reason}.", param, "invalid_value")


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = pydantic_core.from_json(body)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return {name: value for name, value in fields.items() if value is not None}


def _same(value: Any, neutral: Any) -> bool:
    """Equality in which 0 is 0.0, but false is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _hint(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(pydantic_core.to_json(value).decode() for value in neutral)
    return f" (only {values})" if neutral else ""


def _api_error(error: pydantic.ValidationError) -> ApiError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the branches of a union, the one that was meant has its fault deepest.
    deepest = max(faults, key=lambda fault: len(_place(fault["loc"])))
    place = _place(deepest["loc"])
    if deepest["type"] == "missing":
        return invalid(f"Missing required parameter: {place!r}.", place, "missing_required_parameter")
    reasons = sorted({fault["msg"].removeprefix("Value error, ") for fault in faults if _place(fault["loc"]) == place})
    return out_of_range(place, "; or ".join(reasons))


_NAMES = frozenset({"role", "content", "text", "type", "include_usage"})


def _place(loc: tuple[int | str, ...]) -> str:
    """`('messages', 0, 'role')` as `messages[0].role`, without the names of union branches."""
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in loc[1:]
        if isinstance(part, int) or part in _NAMES
    ]
    return str(loc[0]) + "".join(parts)
