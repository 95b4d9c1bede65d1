"""Tools reach the model whatever its chat template knows of them; templates that know them are left alone."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import byte_codec

from actors.errors import InvalidSettingError
from actors.text.codec import TextCodec

TOOL = {"type": "function", "function": {"name": "weather", "description": "Wetter für eine Stadt"}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]
PLAIN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"  # ChatML's shape, as the demo's
KNOWS = (
    "{% if tools %}(tools {{ tools | tojson }}){% endif %}{% for m in messages %}[{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}]{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }}: {{ m.content }}]{% endfor %}"
)


def codec(template: str) -> TextCodec:
    codec = byte_codec()
    codec._tokenizer.chat_template = template
    return codec


def test_a_template_without_a_place_for_tools() -> None:
    written = codec(PLAIN).render_chat(TALK, [TOOL])
    assert written.startswith("[system: ")
    assert '"name": "weather"' in written
    assert "Wetter für eine Stadt" in written
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in written
    assert written.endswith("[tool: sunny]")
    assert codec(PLAIN).render_chat(TALK[:1]) == "[user: hi]"


def test_the_clients_own_system_message_stays() -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, *TALK]
    written = codec(PLAIN).render_chat(messages, [TOOL])
    assert written.startswith("[system: Be brief.\n\n")
    assert written.count("[system: ") == 1


def test_a_template_that_knows_tools_is_left_alone() -> None:
    written = codec(KNOWS).render_chat(TALK, [TOOL])
    assert written.startswith("(tools [")
    assert written.endswith("[user: hi][assistant: <weather Rome>][tool: sunny]")
    assert "<tool_call>" not in written


def test_a_template_without_system_messages_refuses_tools_by_name() -> None:
    with pytest.raises(InvalidSettingError, match="no place for tools") as refused:
        codec(STRICT).render_chat(TALK, [TOOL])
    assert refused.value.param == "tools"
    written = codec(STRICT).render_chat(TALK)
    assert written.endswith("[user: <tool_response>\nsunny\n</tool_response>]")
