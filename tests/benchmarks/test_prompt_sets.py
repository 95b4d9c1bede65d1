"""The held-out prompts: there are enough, and they share nothing with what drafts are trained on."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from actors.errors import ConfigError
from benchmarks.support.prompt_sets import folder_prompts, own_prompts
from cluster.models.demo_draft.__main__ import HELD_PROMPTS
from cluster.models.demo_draft.prompts import KINDS

EIGHT = {"chat", "code", "maths", "extraction", "translation", "summary", "rewriting", "long_context"}


def runs(text: str, length: int = 6) -> set[tuple[str, ...]]:
    """All runs of so many words."""
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[n : n + length]) for n in range(len(words) - length + 1)}


def test_eight_kinds_and_two_hundred_prompts_each_once() -> None:
    kinds = own_prompts()
    assert set(kinds) == EIGHT
    prompts = [prompt for kind in kinds.values() for prompt in kind]
    assert len(set(prompts)) == len(prompts) == 200
    assert {len(kind) for kind in kinds.values()} == {25}


def test_no_prompt_is_of_a_template_that_drafts_are_trained_on() -> None:
    templates = [re.compile(".{1,40}".join(map(re.escape, kind.split("{}")))) for kind in KINDS]
    prompts = [prompt for kind in own_prompts().values() for prompt in kind]
    assert not [prompt for prompt in prompts if any(template.fullmatch(prompt) for template in templates)]


def test_no_run_of_six_words_is_shared_with_training_prompts() -> None:
    trained: set[tuple[str, ...]] = set()
    for text in [*(kind.format("x") for kind in KINDS), *json.loads(HELD_PROMPTS.read_text(encoding="utf-8"))]:
        trained |= runs(text)
    prompts = [prompt for kind in own_prompts().values() for prompt in kind]
    assert not {run for prompt in prompts for run in runs(prompt)} & trained


def test_published_sets_are_read_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").write_text('{"category": "math", "turns": ["one", "two"]}\n\n{"turns": ["three"]}\n')
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write('{"task_id": "x/0", "prompt": "def f():"}\n')
    assert folder_prompts(tmp_path) == {"HumanEval": ["def f():"], "math": ["one"], "question": ["three"]}


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 1, is not JSON"), ('{"text": "x"}', "line 1, has neither"), ("", "no prompts")]
)
def test_what_is_no_set_of_prompts_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "some.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        folder_prompts(tmp_path)
