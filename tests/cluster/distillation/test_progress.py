"""What a run tells while it is under way, and what it does when its time is short. Time is counted, not measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from small_targets import prompts, settings, target

from cluster.distillation.job import Progress
from cluster.distillation.run import distill
from cluster.distillation.store import SampleStore
from deployments.cli.distill_progress import Lines, figures


def ticking() -> Callable[[], float]:
    """A second passes with every look."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def told(tmp_path: Path, **changes: object) -> tuple[list[Progress], list[int]]:
    """What was reported, and the numbers of tokens and of shards."""
    seen: list[Progress] = []
    shards: list[int] = []

    def look(progress: Progress) -> None:
        seen.append(progress)
        if progress.stage == "training" and not shards:
            store = SampleStore(tmp_path / "draft.partial" / "samples")
            shards.extend([store.tokens, len(store.shards)])

    distill(target(), prompts(), tmp_path / "draft", settings(**changes), report=look, clock=ticking())
    return seen, shards


def test_progress_moves_within_a_shard(tmp_path: Path) -> None:
    """A look a pass: a report every other pass, with tokens, their rate and the time left."""
    seen, (tokens, shards) = told(tmp_path)
    sampling = [p for p in seen if p.stage == "sampling"]
    assert len(sampling) > 5 * shards
    assert [p.tokens for p in sampling] == sorted(p.tokens for p in sampling)
    assert sampling[-1].tokens == tokens
    assert [p.done for p in sampling] == sorted(p.done for p in sampling)
    assert all(p.rate is not None and 0 < p.rate <= 8 for p in sampling)  # eight answers grow by a token a second
    evaluation = [p for p in seen if p.stage == "evaluation"]
    assert [p.done for p in evaluation] == [n / 10 for n in range(11)]


def test_a_shard_ends_when_its_time_is_over(tmp_path: Path) -> None:
    """A minute, of which 24 seconds are for sampling, is over within the first shard of 24 answers.

    Each step of the training takes a second, so that the 36 left are enough for 36.
    """
    seen, (tokens, shards) = told(tmp_path, minutes=1, max_tokens=None, max_steps=None)
    assert shards == 1
    assert 0 < tokens <= 8 * 24
    training = [p for p in seen if p.stage == "training"]
    assert len(training) == 36
    assert training[0].note.startswith("a step takes 1.0 s here, so there is time for about 36, which is too few")
    assert [p.note for p in training[1:]] == [""] * 35
    assert training[0].seconds_left == 35
    assert training[-1].seconds_left == 0


def test_lines_are_told_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 0.0, 5.0, 10.0, 11.0])
    lines = Lines(lambda: next(times))
    for done in (0.1, 0.2, 0.3, 1.0):
        lines(Progress("sampling", done, 65.0, tokens=1000, rate=12.4, note="a plan" if done == 0.2 else ""))
    assert capsys.readouterr().err.splitlines() == [
        "sampling     10%  1,000 tokens, 12/s, 1:05 left",
        "sampling: a plan",
        "sampling     30%  1,000 tokens, 12/s, 1:05 left",
        "sampling    100%  1,000 tokens, 12/s, 1:05 left",
    ]
    assert figures(Progress("training", 0.5, 3600.0, loss=1.5, agreement=0.25)) == (
        "loss 1.500, agreement 0.250, 1:00:00 left"
    )
