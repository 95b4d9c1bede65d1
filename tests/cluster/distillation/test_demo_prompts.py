"""The prompts that the demo draft is distilled with."""

from __future__ import annotations

import json

from cluster.models.demo_draft.__main__ import HELD_PROMPTS
from cluster.models.demo_draft.prompts import KINDS, SUBJECTS, prompts


def subject(prompt: str) -> str:
    """What a held-out prompt is about."""
    for kind in KINDS:
        before, after = kind.split("{}")
        if prompt.startswith(before) and prompt.endswith(after):
            return prompt[len(before) : len(prompt) - len(after)]
    raise AssertionError(f"{prompt!r} is of no kind")


def test_no_subject_is_held_out() -> None:
    held = [subject(prompt) for prompt in json.loads(HELD_PROMPTS.read_text(encoding="utf-8"))]
    assert len(held) == 64
    assert {"glaciers", "board games", "doctors", "bridges", "money"} <= set(held)
    assert set(held).isdisjoint(SUBJECTS)


def test_every_kind_meets_every_subject_once() -> None:
    found = prompts()
    assert len(found) == len(set(found)) == len(KINDS) * len(SUBJECTS)
    assert "Why is garlic important?" in found


def test_the_order_is_a_matter_of_the_seed() -> None:
    assert prompts() == prompts(0)
    assert prompts(1) != prompts(0)
    assert sorted(prompts(1)) == sorted(prompts(0))
