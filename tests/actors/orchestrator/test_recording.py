"""Served answers kept for the next draft: what is kept, what is not, and where."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from actors.errors import ConfigError
from cluster.config.deployment import DeploymentConfig, DraftTier, Recording, TargetTier
from cluster.distillation.recorder import recorded_samples
from deployments.orchestrator.answer_recording import AnswerRecorder, answer_recorder


def config(folder: Path, secret: bytes | None = b"0123456789abcdef\n") -> DeploymentConfig:
    file = folder / "secret"
    if secret is not None:
        file.write_bytes(secret)
    return DeploymentConfig(
        target=TargetTier(engine="emulated", model="emulated:reference"),
        draft=DraftTier(kind="none"),
        recording=Recording(folder=str(folder / "answers"), secret_file=str(file)),
    )


def recorder_of(folder: Path) -> AnswerRecorder:
    made = answer_recorder(config(folder))
    assert made is not None
    return made


async def test_what_was_answered_is_kept_and_what_was_broken_off_is_not(start: Any, request_for: Any, tmp_path: Path):
    recorder = recorder_of(tmp_path)
    async with start(keep=recorder.keep) as local:
        asked = dataclasses.replace(request_for("whole", (3, 1, 4), max_tokens=12, logprobs=2), owner="team-a")
        answer = await local.tokens(asked)
        broken = local.orchestrator.generate(request_for("broken", (2, 7), max_tokens=4000))
        await anext(broken)
        await broken.aclose()
    recorder.close()
    [sample] = recorded_samples(tmp_path / "answers" / "answers-0.db")
    assert sample.prompt.tolist() == [3, 1, 4]
    assert sample.answer.tolist() == answer
    assert len(answer) == 12
    assert sample.temperature == 0.0
    assert sample.top_ids[:, 0].tolist() == answer  # the emulated target's likeliest token is the one that it says
    assert b"team-a" not in (tmp_path / "answers" / "answers-0.db").read_bytes()


async def test_answers_are_written_while_the_loop_runs(
    start: Any, request_for: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployments.orchestrator.answer_recording.FLUSH_S", 0.01)
    recorder = recorder_of(tmp_path)
    async with start(keep=recorder.keep) as local:
        await local.tokens(request_for("one", (3, 1, 4), max_tokens=5))
        while not list(recorded_samples(tmp_path / "answers" / "answers-0.db")):
            await asyncio.sleep(0.01)
    recorder.close()


def test_each_orchestrator_has_a_file_and_a_file_left_is_taken_up(tmp_path: Path):
    first, second = recorder_of(tmp_path), recorder_of(tmp_path)
    names = sorted(path.name for path in (tmp_path / "answers").glob("*.db"))
    assert names == ["answers-0.db", "answers-1.db"]
    first.close()
    third = recorder_of(tmp_path)
    assert sorted(path.name for path in (tmp_path / "answers").glob("*.db")) == names
    second.close()
    third.close()


def test_nothing_is_recorded_unless_asked_for():
    assert answer_recorder(DeploymentConfig()) is None


def test_a_secret_that_cannot_be_used_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="secret_file"):
        answer_recorder(config(tmp_path, secret=None))
    with pytest.raises(ConfigError, match="16 to 64 bytes"):
        answer_recorder(config(tmp_path, secret=b"short"))
