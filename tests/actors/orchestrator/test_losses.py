"""Replicas that go, stand still or come back, and orchestrators that were taken for dead: what happens to sequences."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from actors import telemetry
from actors.engines.emulated.engines import EmulatedTarget
from actors.engines.emulated.language import expected_tokens
from actors.engines.emulated.presets import TargetSpec
from actors.errors import DeadlineError, EngineError
from actors.messages import OpenSequence
from actors.replica import replica
from actors.settings import OrchestratorSettings, SamplingSettings, TargetSettings
from actors.target.actor import TargetActor
from actors.telemetry import MemoryRecorder
from actors.transport.links import LinkTable, LocalPeer

LANGUAGE = TargetSpec().language
QUICK = OrchestratorSettings(discovery_period_s=0.02, stall_timeout_s=1.0)
PATIENT = OrchestratorSettings(discovery_period_s=0.02, stall_timeout_s=60.0)
"""For what must happen without anybody being taken for dead, however busy the machine is."""
SLOW = TargetSpec(pass_ms=10, prompt_token_ms=0)


@pytest.fixture(autouse=True)
def quick_pulses(monkeypatch) -> None:
    monkeypatch.setattr("actors.transport.connection.PULSE_PERIOD_S", 0.05)


def truth(request) -> list[int]:
    return list(expected_tokens(request.tokens, request.sampling.max_tokens, None, LANGUAGE))


async def until(condition) -> None:
    """Wait for a state of real threads; bounded by the test's own time limit."""
    while not condition():
        await asyncio.sleep(0.005)


def replicas(local, tier: str) -> dict:
    return local.orchestrator.status()[tier]["replicas"]


async def begin(local, wanted, targets: int = 1, drafts: int = 1) -> asyncio.Future:
    """Start the requests once that many replicas are there to share them."""
    await until(lambda: (len(replicas(local, "target")), len(replicas(local, "draft"))) == (targets, drafts))
    return asyncio.gather(*(local.tokens(request) for request in wanted))


async def test_a_draining_target_finishes_what_runs_and_gets_nothing_new(start, request_for) -> None:
    running = [request_for(f"r{i}", (i + 1,), max_tokens=60, speculation=False) for i in range(6)]
    later = [request_for(f"n{i}", (i + 100,), max_tokens=20) for i in range(4)]
    async with start(targets=2, target_spec=SLOW, settings=PATIENT) as local:
        jobs = await begin(local, running, targets=2)
        await until(lambda: all(r["sequences"] == 3 for r in replicas(local, "target").values()))
        await until(lambda: local.recorder.total(telemetry.COMMITTED) >= 12)
        drained = asyncio.create_task(local.actors["target-0"].drain())
        await until(lambda: replicas(local, "target")["target-0"]["draining"])
        new = await begin(local, later, targets=2)
        await until(lambda: replicas(local, "target")["target-1"]["sequences"] == 7)
        assert replicas(local, "target")["target-0"]["sequences"] == 3
        await drained
        for request, answer in zip([*running, *later], [*await jobs, *await new], strict=True):
            assert answer == truth(request)
        assert local.recorder.total(telemetry.MOVES) == 0


async def test_what_waits_at_a_draining_target_goes_elsewhere_at_once(start, request_for) -> None:
    small = TargetSettings(slots=1)
    wanted = [request_for(f"r{i}", (i + 1,), max_tokens=40, speculation=False) for i in range(6)]
    async with start(targets=2, target_spec=SLOW, target_settings=small, settings=PATIENT) as local:
        jobs = await begin(local, wanted, targets=2)
        await until(lambda: local.recorder.total(telemetry.COMMITTED) >= 4)
        drained = asyncio.create_task(local.actors["target-0"].drain())
        await until(lambda: replicas(local, "target")["target-0"]["sequences"] <= 1)
        await drained
        for request, answer in zip(wanted, await jobs, strict=True):
            assert answer == truth(request)


async def test_a_draining_draft_hands_its_sequences_over(start, request_for) -> None:
    wanted = [request_for(f"r{i}", (i + 1,), max_tokens=120) for i in range(6)]
    async with start(drafts=2, target_spec=SLOW, settings=PATIENT) as local:
        jobs = await begin(local, wanted, drafts=2)
        await until(lambda: all(r["sequences"] == 3 for r in replicas(local, "draft").values()))
        await local.actors["draft-0"].drain()
        assert {n: r["sequences"] for n, r in replicas(local, "draft").items()} == {"draft-0": 0, "draft-1": 6}
        for request, answer in zip(wanted, await jobs, strict=True):
            assert answer == truth(request)


async def test_an_orchestrator_taken_for_dead_opens_its_sequences_again(start, request_for) -> None:
    """It stood still so long that the target gave back what its sequences held; then it goes on."""
    request = request_for("r", (5,), max_tokens=120, speculation=False)
    async with start(target_spec=SLOW, settings=PATIENT) as local:
        job = await begin(local, [request])
        await until(lambda: local.recorder.total(telemetry.COMMITTED) >= 10)
        target = local.actors["target-0"]
        for link in list(target._links._seen):
            await target.leave(link)
        assert (await job)[0] == truth(request)
        assert local.recorder.total(telemetry.MOVES) >= 1
        await until(lambda: not target._holding())


async def test_a_link_that_ended_is_not_listened_to() -> None:
    links: LinkTable[int] = LinkTable(asyncio.get_running_loop(), lambda: 0.0)
    links.meet("a")
    assert links.touch("a")
    stream = links.stream("a")
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    links.forget("a")
    assert await waiting is None
    assert not links.touch("a")
    assert not links.touch("never met")


async def test_a_target_that_stands_still_is_not_met_again_before_it_moves(start, request_for) -> None:
    """Its event loop answers; only its model thread has stopped. Its sequences move once, not once a second."""
    models: list[EmulatedTarget] = []

    def make() -> EmulatedTarget:
        models.append(EmulatedTarget(SLOW, TargetSettings()))
        return models[-1]

    wanted = [request_for(f"r{i}", (i + 1,), max_tokens=60, speculation=False) for i in range(4)]
    async with start(targets=2, make_target=make, settings=QUICK) as local:
        jobs = await begin(local, wanted, targets=2)
        await until(lambda: all(r["sequences"] == 2 for r in replicas(local, "target").values()))
        await until(lambda: local.recorder.total(telemetry.COMMITTED) >= 8)
        models[0].faults.freeze()
        for request, answer in zip(wanted, await jobs, strict=True):
            assert answer == truth(request)
        assert local.recorder.total(telemetry.MOVES) == 2
        assert len(replicas(local, "target")) == 1
        models[0].faults.thaw()
        await until(lambda: len(replicas(local, "target")) == 2)
        await until(lambda: not any(actor._holding() for actor in local.actors.values()))


@pytest.mark.parametrize("tier", ["target-0", "draft-0"])
async def test_a_replica_whose_orchestrator_is_silent_gives_everything_back(start, monkeypatch, tier) -> None:
    monkeypatch.setattr(replica, "LINK_LIMIT_S", 2.0)  # looked at five times as often
    async with start(target_spec=SLOW, settings=PATIENT) as local:
        actor = local.actors[tier]
        await actor.meet("gone")
        await actor.deliver("gone", [OpenSequence("s", (1, 2), SamplingSettings(max_tokens=2000), seed=1)])
        await until(actor._holding)
        monkeypatch.setattr(replica, "LINK_LIMIT_S", 0.0)
        await until(lambda: not actor._holding())
        with pytest.raises(EngineError, match="ended the link"):
            await actor.pulse("gone")


class SkippingPeer(LocalPeer):
    """Loses what the target committed for one sequence past a position, once."""

    def __init__(self, target: object, sequence: str) -> None:
        super().__init__(target)
        self.sequence, self.lost = sequence, False

    async def stream(self, method: str, *args):
        async for batches in super().stream(method, *args):
            for batch in batches:
                for result in list(batch.results):
                    if result.sequence == self.sequence and result.position > 10 and not self.lost:
                        self.lost = True
                        batch.results.remove(result)
            yield batches


async def test_a_gap_in_one_sequence_ends_it_alone(start, request_for) -> None:
    wanted = [request_for(f"r{i}", (i + 1,), max_tokens=80, speculation=False) for i in range(4)]
    async with start(wrap_target=lambda it: SkippingPeer(it, "r0"), target_spec=SLOW, settings=PATIENT) as local:
        await until(lambda: len(replicas(local, "target")) == 1 and len(replicas(local, "draft")) == 1)
        answers = await asyncio.gather(*(local.tokens(request) for request in wanted), return_exceptions=True)
        assert isinstance(answers[0], EngineError)
        assert "committed are" in str(answers[0])
        assert answers[1:] == [truth(request) for request in wanted[1:]]
        assert local.recorder.total(telemetry.MOVES) == 0
        assert local.recorder.total(telemetry.REQUESTS, outcome="error") == 1
        await until(lambda: not any(actor._holding() for actor in local.actors.values()))


async def test_what_nobody_expected_counts_as_an_error_and_leaving_does_not(start, request_for, monkeypatch) -> None:
    async with start(settings=PATIENT) as local:
        stream = local.orchestrator.generate(request_for("left", (1,), max_tokens=2000))
        await anext(stream)
        await stream.aclose()
        assert local.recorder.total(telemetry.REQUESTS, outcome="cancelled") == 1

        def broken(session, result):
            raise ZeroDivisionError

        monkeypatch.setattr("actors.orchestrator.session.Session.deliver", broken)
        with pytest.raises(ZeroDivisionError):
            await local.tokens(request_for("broken", (2,)))
        assert local.recorder.total(telemetry.REQUESTS, outcome="error") == 1
        await until(lambda: not any(actor._holding() for actor in local.actors.values()))


async def test_time_at_an_earlier_orchestrator_counts_towards_the_limit(start, request_for) -> None:
    """Of 3600 s all were spent elsewhere; the error still names the whole limit."""
    async with start(target_spec=SLOW, settings=PATIENT) as local:
        request = replace(request_for("r", (1,), max_tokens=2000), timeout_s=3600.0, elapsed_s=3600.0)
        with pytest.raises(DeadlineError, match="3600 s"):
            await local.tokens(request)


def test_a_replica_does_nothing_before_it_is_started() -> None:
    threads = set(threading.enumerate())
    made: list[bool] = []

    def make() -> EmulatedTarget:
        made.append(True)
        return EmulatedTarget(SLOW, TargetSettings())

    actor = TargetActor("t", make, TargetSettings(), MemoryRecorder())
    assert set(threading.enumerate()) == threads
    assert not made

    async def run() -> None:
        actor.start()
        assert (await actor.card()).vocabulary == LANGUAGE.vocabulary
        await actor.stop()

    asyncio.run(run())
    assert made == [True]
    unstarted = TargetActor("u", make, TargetSettings(), MemoryRecorder())
    asyncio.run(unstarted.stop())
