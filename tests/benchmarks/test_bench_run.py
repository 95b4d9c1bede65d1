"""The bench in one process on fast emulated hardware: every way of decoding says the same, and what it promises."""

from __future__ import annotations

import json
from itertools import dropwhile
from pathlib import Path

import pytest

from actors.settings import TreeSettings
from benchmarks.__main__ import main
from benchmarks.pipeline_scenarios import emulated
from benchmarks.support.actor_rig import LocalRig, RigPlan
from benchmarks.support.load_runner import Lab, Load, Measured
from benchmarks.support.modes import MODES, Mode, in_mode
from cluster.config.deployment import DeploymentConfig


def fast(acceptance: float = 0.8, targets: int = 1) -> DeploymentConfig:
    draft = {"step_ms": 0.3, "agreement": {"acceptance": acceptance, "spread": 0.0}}
    tree = TreeSettings(width=4, branching=3, depth=8, nodes=64)
    return emulated({"pass_ms": 2.0}, draft, targets=targets, drafts=targets, slots=4, tree=tree)


async def measured(config: DeploymentConfig, load: Load, link_delay_ms: float = 0.0) -> Measured:
    return await Lab(LocalRig.start, 1, link_delay_ms).measure("test", config, load)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_way_of_decoding_gives_the_exact_answer(mode: Mode, temperature: float) -> None:
    found = await measured(in_mode(fast(), mode, 3), Load(3, 24, temperature))
    assert found.wrong == 0
    assert found.repeats[0]["tokens"] == 72
    assert found.repeats[0]["errors"] == 0


async def test_in_turn_verifies_whole_proposals_of_a_perfect_draft() -> None:
    found = await measured(in_mode(fast(acceptance=1.0), "in turn", 3), Load(1, 25))
    # The first token comes with the prompt; then each pass commits three draft tokens and a bonus.
    # Passes before the draft is there commit one each; the last one what is left.
    committed = [note.committed for note in found.runs[0].targets[0].passes if note.committed]
    drafted = list(dropwhile(lambda tokens: tokens == 1, committed))
    assert len(drafted) >= 5
    assert drafted[:-1] == [4] * (len(drafted) - 1)
    assert {note.proposed for note in found.runs[0].targets[0].passes[-6:-1]} == {3}
    assert max(note.rows for note in found.runs[0].drafts[0].steps) == 1


async def test_plain_decoding_has_no_draft() -> None:
    found = await measured(in_mode(fast(), "plain", 3), Load(2, 10))
    assert found.runs[0].drafts == []
    assert all(note.proposed == 0 for note in found.runs[0].targets[0].passes)


async def test_load_is_spread_over_replicas_and_noted_by_each() -> None:
    found = await measured(fast(targets=2), Load(8, 16))
    assert found.wrong == 0
    assert all(replica.passes for replica in found.runs[0].targets)
    assert all(replica.steps for replica in found.runs[0].drafts)


async def test_a_delayed_link_is_slower_and_says_the_same() -> None:
    found = await measured(fast(), Load(1, 24), link_delay_ms=3.0)
    assert found.wrong == 0
    # Every delivery is held for at least the delay.
    assert found.repeats[0]["offer_hop_p50_s"] >= 0.003


async def test_wrong_answers_are_counted() -> None:
    config = fast()
    lab = Lab(LocalRig.start, 1)
    found = await lab.measure("test", config, Load(2, 8))
    found.runs[0].answers[0].tokens[3] += 1
    from benchmarks.support.load_runner import wrong_answers

    assert wrong_answers(found.runs[0].answers, config, Load(2, 8)) == 1


async def test_notes_are_taken_once() -> None:
    rig = await LocalRig.start(RigPlan(fast()))
    try:
        first = await rig.run(Load(1, 8).requests("a", 0), 1)
        second = await rig.run(Load(1, 8).requests("b", 0), 1)
    finally:
        await rig.close()
    assert sum(note.committed for note in second.targets[0].passes) <= 8 + 4
    assert first.targets[0].passes[-1].ended <= second.targets[0].passes[0].started


def test_requests_are_the_same_for_every_way_and_other_ones_in_every_repeat() -> None:
    load = Load(4, 20, 1.0, vary=0.5)
    one, two = load.requests("x", 0), load.requests("y", 0)
    assert [(r.tokens, r.sampling) for r in one] == [(r.tokens, r.sampling) for r in two]
    assert not {r.tokens for r in one} & {r.tokens for r in load.requests("x", 1)}
    assert all(10 <= r.sampling.max_tokens <= 30 for r in one)
    assert len({r.id for r in [*one, *two]}) == 8


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    out, timeline = tmp_path / "out", tmp_path / "trace.json"
    arguments = ["one-sequence", "--repeats", "1", "--tokens", "48", "--pass-ms", "4", "--step-ms", "0.5"]
    code = main([*arguments, "--in-process", "--out", str(out), "--trace", str(timeline)])
    written = json.loads((out / "bench.json").read_text())
    assert [row["label"] for row in written["sections"][0]["rows"]] == list(MODES)
    assert code == int(not all(goal["reached"] for s in written["sections"] for goal in s["goals"]))
    assert not any("wrong" in goal["text"] for s in written["sections"] for goal in s["goals"])
    assert json.loads(timeline.read_text())["traceEvents"]
