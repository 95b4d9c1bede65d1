"""How request bodies are read: strict types, null for "not given", and the parameter at fault named in every refusal.

Knows no route.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

from actors.errors import InvalidSettingError, RequestError


class MalformedError(RequestError):
    """The body cannot be read at all."""

    code = "invalid_json"


class Body(BaseModel):
    """A request body: null is the same as absent; `refused` fields may not be sent but with a value that says nothing:
    one of `harmless`, or of false, "", [] and {}."""

    model_config = ConfigDict(strict=True, extra="ignore")
    refused: ClassVar[dict[str, str]] = {}
    harmless: ClassVar[dict[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        for key, why in cls.refused.items():
            if key in given and not _says_nothing(given[key], cls.harmless.get(key, (False, "", [], {}))):
                raise InvalidSettingError(f"{key} is not supported: {why}", key)
        return given


B = TypeVar("B", bound=Body)


def parse(model: type[B], body: bytes) -> B:
    """`body` as a request. Raises RequestError that names the parameter at fault."""
    try:
        data = from_json(body)
    except ValueError as error:
        raise MalformedError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise MalformedError(f"the body must be a JSON object, not {type(data).__name__}")
    return validated(model, data)


def validated(model: type[B], data: dict[str, Any]) -> B:
    """A body that is read already. Raises RequestError that names the parameter at fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = _place(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidSettingError(f"{place}: {message}" if place else message, place or None) from error


def _says_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    """Whether `value` is among `harmless`; true and false are not 1 and 0."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in harmless)


def _place(location: tuple[int | str, ...]) -> str:
    """messages, 0, content -> messages[0].content"""
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return place.removesuffix(".[key]")
