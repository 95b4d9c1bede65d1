"""Conversations with tools, for chat templates that have no place for them: written into the messages' text.

Calls have the form of Hermes and Qwen, which many models were trained on and the doors read. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Message = Mapping[str, object]


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """`messages` with `tools` described in the system message, the first one if there is any."""
    text = description(tools)
    first = messages[0] if messages else {}
    if first.get("role") == "system":
        own = str(first.get("content") or "")
        return [{**first, "content": f"{own}\n\n{text}" if own else text}, *map(dict, messages[1:])]
    return [{"role": "system", "content": text}, *map(dict, messages)]


def description(tools: Sequence[Mapping[str, object]]) -> str:
    """What the model must know to call them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = '<tool_call>\n{"name": "<name of the function>", "arguments": {<its arguments>}}\n</tool_call>'
    return (
        "You may call these functions, each described in JSON on a line of its own:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call one, answer with its name and its arguments in this form, once for each call:\n{form}"
    )


def with_written_calls(message: Message) -> dict[str, object]:
    """A message of the assistant with its calls as text, as the model wrote them; any other as it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    written = [
        json.dumps({"name": call["function"].get("name"), "arguments": call["function"].get("arguments", {})})
        for call in calls
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]
    text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)
    own = str(message.get("content") or "")
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{own}\n{text}" if own else text}


def as_user(message: Message) -> dict[str, object]:
    """A tool's result as something that the user says; any other message as it is."""
    if message.get("role") != "tool":
        return dict(message)
    return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
