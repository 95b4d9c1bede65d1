"""Reading prompts, and splitting them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from actors.errors import ConfigError, PromptError
from cluster.distillation.prompts import Ids, read_prompts, split


class Letters:
    """One id per character; a conversation ends in 99."""

    vocabulary = 100

    def encode(self, text: str, limit: int | None = None, special: bool = True) -> Ids:
        return tuple(ord(c) % 90 for c in text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        limit: int | None = None,
    ) -> Ids:
        return (*self.encode("".join(str(m["content"]) for m in messages), limit), 99)


def read(path: Path, text: str, *, chat: bool = False, limit: int = 20) -> list[Ids]:
    path.write_text(text, encoding="utf-8")
    return read_prompts(path, Letters(), limit, chat=chat)


def test_lines_of_text(tmp_path: Path) -> None:
    a, b = (97 % 90,), (98 % 90,)
    assert read(tmp_path / "p.txt", "a\n\nb\r\na\n") == [a, b]
    assert read(tmp_path / "p.txt", "a\n", chat=True) == [(*a, 99)]


def test_a_line_separator_of_unicode_does_not_end_a_line(tmp_path: Path) -> None:
    assert len(read(tmp_path / "p.jsonl", '"a\u2028b"\n')) == 1


def test_values_of_json(tmp_path: Path) -> None:
    values = ["a", {"prompt": "b"}, {"tokens": [5, 6]}, {"messages": [{"role": "user", "content": "c"}]}]
    expected: list[Ids] = [(7,), (8,), (5, 6), (9, 99)]
    assert read(tmp_path / "p.json", json.dumps(values)) == expected
    assert read(tmp_path / "p.jsonl", "\n".join(map(json.dumps, values))) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "", "holds no prompts"),
        ("p.txt", f"ok\n{'x' * 21}\n", r"p.txt, line 2: the prompt has 21 tokens; at most 20 fit"),
        ("p.jsonl", '"ok"\n" "\n', r"line 2: the prompt is empty"),
        ("p.jsonl", '{"tokens": []}', r"line 1: the prompt is empty"),
        ("p.jsonl", '{"tokens": [100]}', "whole numbers below 100"),
        ("p.jsonl", '{"tokens": [1.5]}', "whole numbers below 100"),
        ("p.jsonl", json.dumps({"tokens": [1] * 21}), "21 tokens; at most 20 fit"),
        ("p.jsonl", '{"question": "why"}', "a prompt is a string"),
        ("p.jsonl", '{"messages": ["hi"]}', "a list of objects"),
        ("p.json", '["ok", 7]', "entry 2: a prompt is a string"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read(tmp_path / name, text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "{", "line 1, is not JSON"),
        ("p.json", "{}", "must hold a list"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name, text)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(tmp_path / "p.txt", Letters(), 20, chat=False)
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        read_prompts(tmp_path / "missing.txt", Letters(), 20, chat=False)


def test_split_is_a_matter_of_the_prompts_alone() -> None:
    prompts = [(n, n + 1) for n in range(50)]
    training, held = split(prompts, 64)
    assert len(held) == 10  # a fifth of 50
    assert sorted([*training, *held]) == prompts
    assert set(split(prompts[::-1], 64)[1]) == set(held)
    assert set(split(prompts, 4)[1]) < set(held)
