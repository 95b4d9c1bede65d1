"""From response_format, structured_outputs and tool_choice to a grammar in llguidance's serialised form.

Nothing is compiled here: whether a grammar can be followed is found out in grammar_check.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from actors.errors import InvalidSettingError

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_ALTERNATIVES = 1024
"""Of `choice`, and of the functions that a forced call may name: more of them take seconds to compile."""


def response_grammar(response_format: dict[str, Any] | None) -> str | None:
    """The grammar of OpenAI's response_format; None for plain text. Raises InvalidSettingError."""
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
            return _from_schema(schema, "response_format")
        case other:
            raise InvalidSettingError(
                f"response_format.type must be 'text', 'json_object' or 'json_schema', not {other!r}", "response_format"
            )


def structured_grammar(structured: dict[str, Any] | None) -> str | None:
    """The grammar of vLLM's structured_outputs: one of json, regex, choice and grammar (Lark)."""
    if not structured:
        return None
    param = "structured_outputs"
    if len(structured) != 1:
        raise InvalidSettingError("structured_outputs takes exactly one of json, regex, choice and grammar", param)
    from llguidance import LLMatcher

    match next(iter(structured.items())):
        case "json", dict() as schema:
            return _from_schema(schema, param)
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


def tool_grammar(tools: Sequence[dict[str, Any]], choice: object) -> str | None:
    """The grammar that forces a call: tool_choice 'required', or one function by name. None leaves it to the model."""
    if choice is None or choice in ("auto", "none"):
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not functions:
        raise InvalidSettingError("tool_choice needs tools", "tool_choice")
    if choice == "required":
        wanted = list(functions)
    elif isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        wanted = [choice["function"].get("name")]
        if not isinstance(wanted[0], str) or wanted[0] not in functions:
            raise InvalidSettingError(f"tool_choice names {wanted[0]!r}, which is not among the tools", "tool_choice")
    else:
        raise InvalidSettingError(
            "tool_choice must be 'none', 'auto', 'required' or {type: 'function', function: {name}}", "tool_choice"
        )
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": functions[name].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in wanted
    ]
    return _from_schema(calls[0] if len(calls) == 1 else {"anyOf": calls}, "tools")


def _from_schema(schema: dict[str, Any] | bool, param: str) -> str:
    from llguidance import LLMatcher

    text = json.dumps(schema)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidSettingError(f"the schema has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS}", param)
    return _bounded(LLMatcher.grammar_from_json_schema(text), param)


def _bounded(grammar: str, param: str) -> str:
    if len(grammar) > 2 * MAX_GRAMMAR_CHARACTERS:
        raise InvalidSettingError("the grammar is too long", param)
    return grammar
