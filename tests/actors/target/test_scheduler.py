"""The scheduler's passes: what drafts are verified beside chunks of prompts."""

from __future__ import annotations

import pytest

from actors.engines.emulated.engines import EmulatedTarget
from actors.engines.emulated.presets import TargetSpec
from actors.messages import Expansion, OpenSequence, ProposalBatch, prefix_key
from actors.settings import SamplingSettings, TargetSettings
from actors.target.proposal_broker import ProposalBroker
from actors.target.scheduler import Scheduler

DECODING = 8
BASE_S, TOKEN_S = 0.010, 0.003


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def opening(name: str, length: int) -> OpenSequence:
    return OpenSequence(
        name, tuple(range(length)), SamplingSettings(temperature=0, max_tokens=99, ignore_eos=True), seed=0
    )


def started(confidence: float) -> Scheduler:
    """Eight sequences that decode, each with one draft token at hand; what a pass costs is known."""
    clock = Clock()
    spec = TargetSpec(pass_ms=1e3 * BASE_S, token_ms=1e3 * TOKEN_S, prompt_token_ms=1e3 * TOKEN_S)
    settings = TargetSettings(slots=2 * DECODING, context=1024)
    model = EmulatedTarget(spec, settings, clock=clock, sleep=clock.sleep)
    broker = ProposalBroker(settings, model.card().vocabulary, clock, trees=True)
    scheduler = Scheduler(model, settings, broker, clock)
    for i in range(DECODING):
        scheduler.open("owner", opening(f"s{i}", 1 + i))
    report = scheduler.step()
    for tokens in (8, 16, 40) * 10:
        broker.controller.observe_pass(tokens, DECODING, BASE_S + TOKEN_S * tokens)
    for result in report:
        prefix = (*range(result.position), *result.tokens)
        guess = Expansion(prefix_key(prefix), len(prefix), (5,), (confidence,))
        broker.offer(ProposalBatch("draft", {result.sequence: [guess]}))
    return scheduler


def test_a_prompt_in_the_pass_makes_drafts_no_more_worth_verifying():
    """A draft token of confidence 0.6 adds 0.6 tokens for 3 ms; eight sequences commit 8 tokens in 10 + 8 · 3 = 34 ms,
    0.71 in 3 ms: not worth it. The 256 prompt tokens make this pass last 802 ms, in which 3 ms would seem nothing."""
    scheduler = started(0.6)
    scheduler.open("owner", opening("long", 400))
    report = scheduler.step()
    assert report.tokens == DECODING + 256
    assert report.declined == DECODING


def test_drafts_that_are_worth_verifying_are_so_beside_a_prompt():
    """0.9 tokens for 3 ms are more than 0.71."""
    scheduler = started(0.9)
    scheduler.open("owner", opening("long", 400))
    report = scheduler.step()
    assert report.tokens == 2 * DECODING + 256
    assert report.declined == 0


def test_a_prompt_of_one_chunk_is_decided_in_the_same_pass():
    """Its last token counts as one that is decided, those before it as prompt: 10 + 3 · (8 + 1 + 99) = 334 ms."""
    scheduler = started(0.6)
    scheduler.open("owner", opening("short", 100))
    report = scheduler.step()
    assert report.seconds == pytest.approx(0.334)
    assert {result.sequence for result in report} >= {"short"}
