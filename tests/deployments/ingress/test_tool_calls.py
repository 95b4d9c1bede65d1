"""Calls and text in one answer: the same however it is cut into pieces, and nothing held that cannot become a call."""

from __future__ import annotations

import json
import random

import pytest

from deployments.ingress.tools.tool_calls import ToolCallReader

NAMES = ("weather", "time")


def call(city: str, name: str = "weather") -> str:
    return json.dumps({"name": name, "arguments": {"city": city}}, ensure_ascii=False)


def tagged(city: str) -> str:
    return f"<tool_call>\n{call(city)}\n</tool_call>"


def read(pieces: list[str], parallel: bool = True) -> tuple[str, list[tuple[str, object]]]:
    reader = ToolCallReader(NAMES, parallel)
    steps = [reader.push(piece) for piece in pieces] + [reader.finish()]
    calls = [(one.name, json.loads(one.arguments)) for _, calls in steps for one in calls]
    return "".join(text for text, _ in steps), calls


def weather(*cities: str) -> list[tuple[str, object]]:
    return [("weather", {"city": city}) for city in cities]


ANSWERS = [
    ("Let me see. " + tagged("Rome"), "Let me see. ", weather("Rome")),
    (tagged("Rome") + "\nI asked.", "\nI asked.", weather("Rome")),
    (tagged("Rome") + " and " + tagged("Oslo"), " and ", weather("Rome", "Oslo")),
    ("\n" + tagged("Rome") + "\n" + tagged("Oslo") + "\n", "", weather("Rome", "Oslo")),
    (f"<tool_call>{call('Rome')}", "", weather("Rome")),
    (f"<tool_call>{call('Rome')}</tool_c", "", weather("Rome")),
    (tagged("Rome") + "<tool_call>" + call("Oslo")[:-5], "<tool_call>" + call("Oslo")[:-5], weather("Rome")),
    ("a <tool_call>not json", "a <tool_call>not json", []),
    ("<tool_call>" + tagged("Rome"), "<tool_call>", weather("Rome")),
    ("a < b, a <tool", "a < b, a <tool", []),
    (
        "<tool_call>" + call("Rome", "other") + "</tool_call>",
        "<tool_call>" + call("Rome", "other") + "</tool_call>",
        [],
    ),
    (call("Rome"), "", weather("Rome")),
    (call("Rome") + "; " + call("Oslo"), "", weather("Rome", "Oslo")),
    (call("Rome") + "; done", "; done", weather("Rome")),
    (call("Rome") + "\nThere.", "\nThere.", weather("Rome")),
    ("<|python_tag|>" + call("Rome"), "", weather("Rome")),
    (f"[TOOL_CALLS][{call('Rome')}, {call('Oslo')}] so", " so", weather("Rome", "Oslo")),
    (f"[{call('Rome')}]", "", weather("Rome")),
    ('{"name": "weather", "population": 3}', '{"name": "weather", "population": 3}', []),
    ('{"name": "weather"}', '{"name": "weather"}', []),
    ('<tool_call>{"name": "weather"}</tool_call>', "", [("weather", {})]),
    ('{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', "", weather("Rome")),
    ('{"name": "weather", "arguments": null}', "", [("weather", {})]),
    ('{"name": "weather", "arguments": "{broken"}', '{"name": "weather", "arguments": "{broken"}', []),
    ('{"arguments": {"city": "} ] \\" {"}, "name": "weather"}', "", weather('} ] " {')),
    ('{"n\\u0061me": "weather", "parameters": {"name": "x"}, "id": "1"}', "", [("weather", {"name": "x"})]),
    ("[a link](https://test) " + tagged("Rome"), "[a link](https://test) ", weather("Rome")),
    ("  text  ", "  text  ", []),
    ("{}", "{}", []),
    ("[]", "[]", []),
    ("[[1]]", "[[1]]", []),
    ("[1, 2]", "[1, 2]", []),
    ('["a"]', '["a"]', []),
    ("   ", "   ", []),
    ("", "", []),
    ("text " + call("Rome"), "text " + call("Rome"), []),
]


@pytest.mark.parametrize(("answer", "text", "calls"), ANSWERS)
def test_text_and_calls_however_they_are_cut(answer: str, text: str, calls: list[tuple[str, object]]) -> None:
    assert read([answer]) == (text, calls)
    assert read(list(answer)) == (text, calls)
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(answer) + 1), min(4, len(answer))))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert read(pieces) == (text, calls)


def test_the_first_of_several_calls() -> None:
    answer = tagged("Rome") + " and " + tagged("Oslo")
    assert read([answer], parallel=False) == read(list(answer), parallel=False) == (" and ", weather("Rome"))


@pytest.mark.parametrize(
    ("answer", "held"),
    [
        ('{"city": "' + "x" * 200, 2),  # the first letter of the key decides
        ('{"name": "Paris", "population": 3', 10),  # the first letter of the name
        ('{"name": "weather", "population": 3', 22),  # after "parameters"
        ('{"name": "weather", "arguments": 51', 33),
        ("[a link](https://test)", 1),
        ('["a", "b"]', 1),
        ("[1, 2]", 1),
        ("{1", 1),
        ("<tool_call>\nnone", 12),
        ("<table>", 2),
    ],
)
def test_what_can_no_longer_be_a_call_flows_at_once(answer: str, held: int) -> None:
    """held: characters whose text is not told yet when they have come; with the next one all of it is."""
    reader = ToolCallReader(NAMES)
    assert all(reader.push(character) == ("", []) for character in answer[:held])
    assert reader.push(answer[held]) == (answer[: held + 1], [])
    for character in answer[held + 1 :]:
        assert reader.push(character) == (character, [])


def test_a_call_is_told_when_it_is_complete() -> None:
    reader = ToolCallReader(NAMES)
    for piece in (call("Rome")[:-1], "}", " and more"):
        told = reader.push(piece)
        assert (bool(told[1]), told[0]) == (piece == "}", piece if piece == " and more" else "")


def test_long_answers_cost_no_more_per_character() -> None:
    """200,000 characters inside a call, one by one; a scan of all of them each time would be 2e10 steps."""
    reader = ToolCallReader(NAMES)
    answer = call("x" * 200_000)
    told = [calls for character in answer for calls in reader.push(character)[1]]
    assert len(told) == 1
