"""Structured output from the schemas that clients write: what each grammar lets a model say, and what not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_model import CODEC

from actors.algorithms.grammar import GrammarCompiler
from actors.errors import InvalidSettingError
from deployments.ingress.grammars.structured_output import response_grammar, structured_grammar, tool_grammar

COMPILER = GrammarCompiler(CODEC._tokenizer.backend_tokenizer.to_str(), CODEC.vocabulary, (0,))


def allows(grammar: str | None, text: str) -> bool:
    """Whether an answer may be exactly `text`."""
    assert grammar is not None
    matcher = COMPILER.matcher(grammar)
    path = CODEC.encode(text, special=False)
    return all(bool(matcher.mask(path[:i])[token]) for i, token in enumerate((*path, 0)))


def of_schema(schema: Any, close: bool = True) -> str | None:
    return response_grammar({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, close)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def seats(defs: str, kind: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"seat": {"$ref": f"#/{defs}/Seat"}},
        "required": ["seat"],
        defs: {"Seat": {"type": kind}},
    }


@pytest.mark.parametrize("defs", ["$defs", "definitions"])
def test_tools_with_the_same_definition_names_keep_their_own(defs: str) -> None:
    grammar = tool_grammar([tool("row", seats(defs, "integer")), tool("named", seats(defs, "string"))], "required")
    assert allows(grammar, call("row", '{"seat": 3}'))
    assert allows(grammar, call("named", '{"seat": "a"}'))
    assert not allows(grammar, call("row", '{"seat": "a"}'))
    assert not allows(grammar, call("named", '{"seat": 3}'))


NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
}


def test_a_reference_to_the_whole_is_to_the_tools_own_schema() -> None:
    for grammar in (
        tool_grammar([tool("add", NODE), tool("b", {})], "required"),
        tool_grammar([tool("add", NODE)], {"function": {"name": "add"}}),
    ):
        assert allows(grammar, call("add", '{"value": 1, "next": {"value": 2, "next": null}}'))
        assert not allows(grammar, call("add", '{"value": 1, "next": ' + call("add", "{}") + "}"))


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/properties/first", {}),
        ("#Seat", {"$defs": {"S": {"$anchor": "Seat", "type": "integer"}}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": {"type": "integer"}}}),
        ("#/$defs/a%20b", {"$defs": {"a b": {"type": "integer"}}}),
        ("https://shop.test/seat#/$defs/S", {"$id": "https://shop.test/seat", "$defs": {"S": {"type": "integer"}}}),
        ("#/$defs/S", {"$id": "https://shop.test/seat", "$defs": {"S": {"type": "integer"}}}),
    ],
)
def test_every_kind_of_reference(reference: str, more: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"first": {"type": "integer"}, "second": {"$ref": reference}},
        "required": ["first", "second"],
        **more,
    }
    for grammar, form in ((of_schema(schema), "%s"), (tool_grammar([tool("f", schema)], "required"), call("f", "%s"))):
        assert allows(grammar, form % '{"first": 1, "second": 2}')
        assert not allows(grammar, form % '{"first": 1, "second": "2"}')


def test_data_is_not_taken_for_a_reference() -> None:
    schema = {"type": "object", "properties": {"a": {"const": {"$ref": "#"}}}, "required": ["a"]}
    assert allows(tool_grammar([tool("f", schema)], "required"), call("f", '{"a": {"$ref": "#"}}'))


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
INVENTED = '{"city": "Paris", "location": "Bienvenue"}'


def test_objects_are_closed_unless_they_open_themselves() -> None:
    for schema in (CITY, {"type": "array", "items": CITY}, {"anyOf": [CITY, {"type": "integer"}]}):
        form = "[%s]" if schema.get("type") == "array" else "%s"
        assert allows(of_schema(schema), form % '{"city": "Paris"}')
        assert not allows(of_schema(schema), form % INVENTED)
        assert allows(of_schema(schema, close=False), form % INVENTED)
    assert not allows(tool_grammar([tool("f", CITY)], "required"), call("f", INVENTED))
    assert allows(tool_grammar([tool("f", CITY)], "required", close=False), call("f", INVENTED))
    assert allows(of_schema({**CITY, "additionalProperties": True}), INVENTED)
    assert allows(of_schema({**CITY, "additionalProperties": {"type": "string"}}), INVENTED)
    assert allows(of_schema({**CITY, "unevaluatedProperties": True, "additionalProperties": True}), INVENTED)
    assert not allows(of_schema({**CITY, "unevaluatedProperties": False}), INVENTED)
    assert allows(of_schema({"type": "object"}), INVENTED)
    assert allows(response_grammar({"type": "json_object"}), INVENTED)
    assert allows(of_schema({"type": "object", "properties": {}}), "{}")
    assert not allows(of_schema({"type": "object", "properties": {}}), INVENTED)


def test_the_switch_of_vllm() -> None:
    for value, invented in ((True, False), (False, True)):
        structured = {"json": CITY, "disable_additional_properties": value}
        assert allows(structured_grammar(structured), INVENTED) == invented
        assert allows(structured_grammar(structured, close=False), INVENTED) == invented


BASE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MORE = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [BASE, MORE]},
        {"allOf": [{"$ref": "#/$defs/Base"}, MORE], "$defs": {"Base": BASE}},
        {"$ref": "#/$defs/Base", **MORE, "$defs": {"Base": BASE}},
        {**BASE, "anyOf": [MORE, {"properties": {"c": {}}, "required": ["c"]}]},
        {"allOf": [{"$ref": "#/$defs/Both"}], "$defs": {"Both": {"allOf": [BASE, MORE]}}},
    ],
)
def test_composed_objects_are_closed_around_all_their_names(schema: dict[str, Any]) -> None:
    grammar = of_schema(schema)
    orders = ['{"a": 1, "b": 2%s}', '{"b": 2, "a": 1%s}']
    assert any(allows(grammar, order % "") for order in orders)
    assert not any(allows(grammar, order % ', "d": 1') for order in orders)
    assert not allows(grammar, '{"a": 1}')


def test_a_schema_that_unfolds_without_end_is_refused() -> None:
    doubling: dict[str, Any] = {
        f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 2, "properties": {f"p{i}": {}}} for i in range(40)
    }
    with pytest.raises(InvalidSettingError, match="parts"):
        of_schema({"$ref": "#/$defs/A0", "$defs": {**doubling, "A40": BASE}})


def test_annotations_pass() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "title": "T",
        "properties": {
            "a": {"type": "string", "format": "password", "examples": ["x"], "default": 1, "deprecated": True},
            "b": {"type": "array", "items": {"type": "integer", "format": "int64"}, "uniqueItems": False},
        },
        "required": ["a", "b"],
    }
    for grammar, form in ((of_schema(schema), "%s"), (tool_grammar([tool("f", schema)], "required"), call("f", "%s"))):
        assert allows(grammar, form % '{"a": "anything", "b": [1, 1]}')
    dated = of_schema({"type": "string", "format": "date"})
    assert allows(dated, '"2024-02-29"')
    assert not allows(dated, '"tomorrow"')


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("uniqueItems", True),
        ("contains", {}),
        ("not", {"type": "null"}),
        ("if", {}),
        ("propertyNames", {"maxLength": 3}),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_tool_and_place(keyword: str, value: Any) -> None:
    bad = {"type": "object", "properties": {"tags": {"type": "array", keyword: value}}}
    with pytest.raises(InvalidSettingError, match=rf"tool 'bad'.*'{keyword}', at /properties/tags") as refused:
        tool_grammar([tool("good", CITY), tool("bad", bad)], "required")
    assert refused.value.param == "tools"
    with pytest.raises(InvalidSettingError, match=rf"'{keyword}', at /properties/tags"):
        of_schema(bad)


def test_white_space_is_bounded() -> None:
    grammar = response_grammar({"type": "json_object"})
    value = {"poem": [{"line": "rain   rain"}, 1, None], "b": {}}
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=4)):
        assert allows(grammar, text)
    assert allows(grammar, '{"a": "     \\n\\n\\n     "}')  # inside of a string nothing is bounded
    for blank in (" " * 5, "\n\n", "\n" + " " * 33, "\t" * 5):
        for text in (f'{{{blank}"a": 1}}', f'{{"a":{blank}1}}', f'{{"a": 1{blank}}}', f'{{"a": [1,{blank}2]}}'):
            assert not allows(grammar, text)
