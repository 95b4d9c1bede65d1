"""From response_format, structured_outputs and tool_choice to a grammar in llguidance's serialised form.

Nothing is compiled here: whether a grammar can be followed is found out in grammar_check.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from actors.errors import InvalidSettingError
from deployments.ingress.grammars.json_schemas import closed, rebased, without_annotations

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_ALTERNATIVES = 1024
"""Of `choice`, and of the functions that a forced call may name: more of them take seconds to compile."""


WHITE_SPACE = r"(?:[ \t]{1,4}|\r?\n[ \t]{0,32})"
"""Between the tokens of JSON: a little, or a new line with its indentation. Unbounded, it is what a small model fills
an answer with."""


def response_grammar(response_format: dict[str, Any] | None, close: bool = True) -> str | None:
    """The grammar of OpenAI's response_format; None for plain text. Raises InvalidSettingError.

    close: whether objects hold only the keys that their schema names, where it says nothing else; also below.
    """
    if response_format is None:
        return None
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return _from_schema({"type": "object"}, "response_format")
        case "json_schema":
            described = response_format.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict | bool):
                raise InvalidSettingError("response_format.json_schema.schema must be a JSON schema", "response_format")
            return _from_schema(_prepared(schema, close, "response_format"), "response_format")
        case other:
            raise InvalidSettingError(
                f"response_format.type must be 'text', 'json_object' or 'json_schema', not {other!r}", "response_format"
            )


def structured_grammar(structured: dict[str, Any] | None, close: bool = True) -> str | None:
    """The grammar of vLLM's structured_outputs: one of json, regex, choice and grammar (Lark).

    `disable_additional_properties` beside it overrides `close`, as in vLLM.
    """
    if not structured:
        return None
    param = "structured_outputs"
    switch = structured.get("disable_additional_properties", close)
    if not isinstance(switch, bool):
        raise InvalidSettingError("structured_outputs.disable_additional_properties must be true or false", param)
    structured = {k: v for k, v in structured.items() if v is not None and k != "disable_additional_properties"}
    if len(structured) != 1:
        raise InvalidSettingError("structured_outputs takes exactly one of json, regex, choice and grammar", param)
    from llguidance import LLMatcher

    match next(iter(structured.items())):
        case "json", dict() as schema:
            return _from_schema(_prepared(schema, switch, param), param)
        case "regex", str() as pattern:
            return _bounded(LLMatcher.grammar_from_regex(pattern), param)
        case "grammar", str() as lark:
            return _bounded(LLMatcher.grammar_from_lark(lark), param)
        case "choice", list() as choices if len(choices) > MAX_ALTERNATIVES:
            raise InvalidSettingError(f"choice has {len(choices)} alternatives; at most {MAX_ALTERNATIVES}", param)
        case "choice", list() as choices if choices and all(isinstance(c, str) and c for c in choices):
            alternatives = " | ".join(json.dumps(choice) for choice in choices)
            return _bounded(LLMatcher.grammar_from_lark(f"start: {alternatives}"), param)
        case key, _:
            raise InvalidSettingError(f"structured_outputs.{key} is not supported, or not of its type", param)


def tool_grammar(tools: Sequence[dict[str, Any]], choice: object, close: bool = True) -> str | None:
    """The grammar that forces a call: tool_choice 'required', or one function by name. None leaves it to the model."""
    wanted = forced_tools(tools, choice)
    if not wanted:
        return None
    # Parameters keep their own references: each schema stands whole under $defs, and its pointers begin there.
    definitions = {f"tool_{i}": _parameters(functions, i, close) for i, functions in enumerate(wanted)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/tool_{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, function in enumerate(wanted)
    ]
    return _from_schema({"anyOf": calls, "$defs": definitions}, "tools")


def forced_tools(tools: Sequence[dict[str, Any]], choice: object) -> list[dict[str, Any]]:
    """The functions one of which must be called; empty where the model chooses. Raises InvalidSettingError."""
    if choice is None or choice in ("auto", "none"):
        return []
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not functions:
        raise InvalidSettingError("tool_choice needs tools", "tool_choice")
    if choice == "required":
        return list(functions.values())
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if not isinstance(name, str) or name not in functions:
            raise InvalidSettingError(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
        return [functions[name]]
    raise InvalidSettingError(
        "tool_choice must be 'none', 'auto', 'required' or {type: 'function', function: {name}}", "tool_choice"
    )


def _parameters(function: dict[str, Any], index: int, close: bool) -> dict[str, Any]:
    """What the arguments of a call must be, for a place under $defs/tool_{index}."""
    schema = function.get("parameters") or {"type": "object"}
    prepared = _prepared(schema, close, "tools", f"tool {function['name']!r}: ")
    assert isinstance(prepared, dict)
    return rebased(prepared, f"/$defs/tool_{index}")


def _prepared(schema: dict[str, Any] | bool, close: bool, param: str, whose: str = "") -> dict[str, Any] | bool:
    """A client's schema as the grammar is made of it. Raises InvalidSettingError that says whose keyword is wrong."""
    if isinstance(schema, bool):
        return schema
    try:
        plain = without_annotations(rebased(schema, ""))
        return closed(plain) if close else plain
    except ValueError as error:
        raise InvalidSettingError(f"{whose}the JSON schema cannot be followed: {error}", param) from error
    except RecursionError as error:
        raise InvalidSettingError(f"{whose}the JSON schema is nested too deeply", param) from error


def _from_schema(schema: dict[str, Any] | bool, param: str) -> str:
    from llguidance import LLMatcher

    text = json.dumps(schema if isinstance(schema, dict) else {"allOf": [schema]})  # options need an object
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidSettingError(f"the schema has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS}", param)
    return _bounded(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITE_SPACE}), param)


def _bounded(grammar: str, param: str) -> str:
    if len(grammar) > 2 * MAX_GRAMMAR_CHARACTERS:
        raise InvalidSettingError("the grammar is too long", param)
    return grammar
