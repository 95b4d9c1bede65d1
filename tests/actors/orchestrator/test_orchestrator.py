"""Invariants 1 to 5 of the design, through the real actors on emulated engines in one process.

The emulated target's tokens are a hash of the prefix, so that the right answer is known without running anything.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pace import Pace

from actors import telemetry
from actors.engines.emulated.engines import EmulatedDraft, EmulatedTarget
from actors.engines.emulated.language import expected_tokens
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.engines.protocol import Row
from actors.errors import DeadlineError, OverloadedError, PromptTooLongError, UnavailableError
from actors.messages import VerificationResult
from actors.settings import DraftSettings, LookaheadSettings, OrchestratorSettings, TargetSettings, TreeSettings
from benchmarks.support.chaos_link import ChaosSettings

LANGUAGE = TargetSpec().language
QUICK = OrchestratorSettings(discovery_period_s=0.02, stall_timeout_s=1.5)


def truth(request) -> list[int]:
    sampling = request.sampling
    seed = None if sampling.greedy else sampling.seed
    return list(expected_tokens(request.tokens, sampling.max_tokens, seed, LANGUAGE))


def requests(request_for, n, rng):
    prompts = [tuple(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 300))) for _ in range(n)]
    return [
        request_for(f"r{i}", prompt, max_tokens=rng.randrange(1, 60), temperature=rng.choice([0.0, 0.8]), seed=i)
        for i, prompt in enumerate(prompts)
    ]


def paced(pace: Pace, settings: TargetSettings) -> dict[str, Any]:
    """Engines for `start`: drafts keep up with the target, however busy the machine is."""
    target = TargetSpec(pass_ms=2, token_ms=0.02, prompt_token_ms=0)
    draft = DraftSpec(step_ms=0.3, row_ms=0.01, prompt_token_ms=0)
    return {
        "target_settings": settings,
        "make_target": lambda: pace.target(EmulatedTarget(target, settings)),
        "make_draft": lambda: pace.draft(EmulatedDraft(draft, DraftSettings())),
    }


async def check_all(local, wanted) -> None:
    answers = await asyncio.gather(*(local.tokens(request) for request in wanted))
    for request, answer in zip(wanted, answers, strict=True):
        assert answer == truth(request)


async def settled(local) -> None:
    """Wait until both tiers report that nothing is held any more (bounded by the test's own time limit)."""
    while any(actor._busy() or held(actor) for actor in local.actors.values()):
        await asyncio.sleep(0.01)


def held(actor) -> int:
    if hasattr(actor, "_owners"):
        return len(actor._owners) + len(actor._model._sessions)
    return actor._scheduler.active + actor._scheduler.queued + len(actor._broker.mailbox)


@pytest.mark.parametrize("drafts", [0, 1, 2])
async def test_answers_are_the_targets_with_any_number_of_drafts(start, request_for, drafts) -> None:
    async with start(drafts=drafts, targets=2, **paced(Pace(), TargetSettings())) as local:
        await check_all(local, requests(request_for, 24, random.Random(drafts)))
        await settled(local)
        accepted = local.recorder.total(telemetry.ACCEPTED)
        assert (accepted > 0) == (drafts > 0)
        assert accepted <= local.recorder.total(telemetry.PROPOSED)


@pytest.mark.parametrize("mode", ["adaptive", "fixed"])
@pytest.mark.parametrize("tree", [TreeSettings(width=1, branching=1, depth=3), TreeSettings(), TreeSettings(nodes=4)])
async def test_answers_do_not_depend_on_lookahead_or_tree(start, request_for, mode, tree) -> None:
    target = TargetSettings(slots=3, lookahead=LookaheadSettings(mode=mode, maximum=5))
    async with start(target_settings=target, draft_settings=DraftSettings(tree=tree)) as local:
        await check_all(local, requests(request_for, 8, random.Random(7)))


@pytest.mark.parametrize("seed", range(3))
async def test_a_chaotic_draft_link_never_changes_a_token(start, request_for, chaotic, seed) -> None:
    chaos = ChaosSettings(delay_ms=1, jitter_ms=5, reorder=0.2, drop=0.1, duplicate=0.1, seed=seed)
    async with start(wrap_draft=chaotic(chaos), **paced(Pace(), TargetSettings())) as local:
        await check_all(local, requests(request_for, 16, random.Random(seed)))
        assert local.recorder.total(telemetry.PROPOSED) > 0


async def test_a_draft_that_is_always_wrong_changes_nothing(start, request_for) -> None:
    foe = DraftSpec(step_ms=0.3, agreement={"acceptance": 0.0, "spread": 0.0, "corrections": (0, 0, 0, 0)})
    async with start(draft_spec=foe) as local:
        await check_all(local, requests(request_for, 8, random.Random(3)))
        assert local.recorder.total(telemetry.ACCEPTED) == 0


class HaltingTarget:
    """A target model that halts before a pass as soon as `due` says so, until it is let go; once only.

    What happens meanwhile happens in mid-stream, however slowly the machine runs.
    """

    def __init__(self, model: Any, due: Callable[[], bool]) -> None:
        self._model, self._due = model, due
        self.halted, self.let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        if not self.halted.is_set() and self._due():
            self.halted.set()
            self.let_go.wait()
        outcomes: list[VerificationResult | None] = self._model.forward(rows)
        return outcomes


@asynccontextmanager
async def halted(target: HaltingTarget, jobs: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Wait until the target halts, and let it go at the end. Raises what the answers do if they end before."""
    halt = asyncio.ensure_future(asyncio.to_thread(target.halted.wait))
    try:
        await asyncio.wait([jobs, halt], return_when=asyncio.FIRST_COMPLETED)
        assert target.halted.is_set(), f"the answers ended before what was to happen in between: {await jobs}"
        yield
    finally:
        target.halted.set()
        target.let_go.set()
        await halt


async def test_losing_the_draft_in_mid_stream_changes_nothing(start, request_for, cuttable) -> None:
    """Drafts keep up with the target until 50 of their tokens are accepted; the target halts there. 12 answers of 300
    tokens are then far from their end: a pass accepts at most 12 * 4."""
    peers, running = [], []

    def wrap(actor):
        peers.append(cuttable(actor))
        return peers[-1]

    # Fixed: an adaptive lookahead measures passes, and on a busy machine it may find that drafts do not pay.
    settings = TargetSettings(lookahead=LookaheadSettings(mode="fixed", maximum=4))
    pace = Pace(patience_s=5.0)
    engines = paced(pace, settings)
    target = HaltingTarget(engines["make_target"](), lambda: running[0].recorder.total(telemetry.ACCEPTED) >= 50)
    wanted = [request_for(f"r{i}", (i + 1,), max_tokens=300) for i in range(12)]
    async with start(drafts=2, wrap_draft=wrap, settings=QUICK, **{**engines, "make_target": lambda: target}) as local:
        running.append(local)
        jobs = asyncio.gather(*(local.tokens(request) for request in wanted))
        async with halted(target, jobs):
            peers[0].dead.set()
            local.drafts.peers.pop("draft-0")
            peers[1].frozen = True
            pace.steps = 0  # nobody keeps up any more
        for request, answer in zip(wanted, await jobs, strict=True):
            assert answer == truth(request)


@pytest.mark.parametrize("way", ["dead", "frozen"])
async def test_losing_a_target_moves_its_sequences(start, request_for, cuttable, way) -> None:
    peers = []

    def wrap(actor):
        peers.append(cuttable(actor))
        return peers[-1]

    wanted = [request_for(f"r{i}", (i + 1,), max_tokens=80, temperature=1.0, seed=i) for i in range(12)]
    async with start(targets=2, wrap_target=wrap, settings=QUICK) as local:
        jobs = asyncio.gather(*(local.tokens(request) for request in wanted))
        while local.recorder.total(telemetry.COMMITTED) < 200:
            await asyncio.sleep(0.005)
        if way == "dead":
            peers[0].dead.set()
        else:
            peers[0].frozen = True
        local.targets.peers.pop("target-0")
        for request, answer in zip(wanted, await jobs, strict=True):
            assert answer == truth(request)


async def test_everything_is_given_back_when_clients_leave(start, request_for) -> None:
    rng = random.Random(5)
    async with start(target_settings=TargetSettings(slots=8)) as local:

        async def impatient(i: int) -> None:
            stream = local.orchestrator.generate(request_for(f"r{i}", (i + 1,), max_tokens=1000))
            for _ in range(rng.randrange(1, 4)):
                await anext(stream)
            await stream.aclose()

        await asyncio.gather(*(impatient(i) for i in range(40)))
        await settled(local)
        assert local.orchestrator.status()["sessions"] == 0
        await check_all(local, requests(request_for, 4, rng))


async def test_messages_per_pass_do_not_grow_with_sequences(start, request_for) -> None:
    """However many sequences there are, a pass is one commit and a draft step one offer; besides, each sequence is
    opened and closed at two replicas. A message for each sequence and pass would be 32 times those of the passes."""
    for n in (1, 32):
        spec = TargetSpec(pass_ms=10, prompt_token_ms=0)
        draft = DraftSpec(step_ms=5)
        async with start(target_settings=TargetSettings(slots=32), target_spec=spec, draft_spec=draft) as local:
            await check_all(local, [request_for(f"r{i}", (i + 1,), max_tokens=60) for i in range(n)])
            status = local.orchestrator.status()
            messages = sum(r["messages"] for tier in ("target", "draft") for r in status[tier]["replicas"].values())
            passes, steps = (local.recorder.total(metric) for metric in (telemetry.PASSES, telemetry.DRAFT_STEPS))
            assert messages <= passes + steps + 4 * n
            # 60 tokens of up to 9 a pass are 7 passes at least.
            assert passes >= 7


async def test_bad_requests_are_refused_before_anything_is_taken(start, request_for) -> None:
    async with start(target_settings=TargetSettings(context=64)) as local:
        with pytest.raises(PromptTooLongError, match="context is 64"):
            await local.tokens(request_for("long", tuple(range(1, 80))))
        for bad in [(), (LANGUAGE.vocabulary,)]:
            with pytest.raises(Exception, match="prompt") as caught:
                await local.tokens(request_for("bad", bad))
            assert caught.value.param == "prompt"
        clamped = request_for("clamped", tuple(range(1, 61)), max_tokens=1000)
        assert len(await local.tokens(clamped)) == 4
        assert local.orchestrator.status()["sessions"] == 0


async def test_a_full_queue_refuses_the_excess_alone(start, request_for) -> None:
    small = TargetSettings(slots=1, queue=2)
    async with start(target_settings=small) as local:
        jobs = [local.tokens(request_for(f"r{i}", (i + 1,), max_tokens=30)) for i in range(8)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        refused = [r for r in results if isinstance(r, OverloadedError)]
        assert len(refused) >= 4
        assert all(isinstance(r, OverloadedError | list) for r in results)
        await check_all(local, [request_for("after", (9,))])


async def test_no_target_is_a_typed_error_after_the_configured_wait(start, request_for) -> None:
    async with start(targets=0, settings=OrchestratorSettings(unavailable_timeout_s=0.05)) as local:
        with pytest.raises(UnavailableError):
            await local.tokens(request_for("r", (1,)))


async def test_a_deadline_ends_the_request_and_frees_it(start, request_for) -> None:
    async with start(settings=OrchestratorSettings(request_timeout_s=0.1, discovery_period_s=0.02)) as local:
        with pytest.raises(DeadlineError):
            await local.tokens(request_for("r", (1,), max_tokens=2000))
        await settled(local)


async def test_a_new_target_takes_what_waits_for_a_slot(start, request_for) -> None:
    small = TargetSettings(slots=2, queue=64)
    async with start(targets=2, target_settings=small) as local:
        late = local.targets.peers.pop("target-1")
        wanted = [request_for(f"r{i}", (i + 1,), max_tokens=60) for i in range(16)]
        jobs = asyncio.gather(*(local.tokens(request) for request in wanted))
        while local.recorder.total(telemetry.COMMITTED) < 50:
            await asyncio.sleep(0.005)
        local.targets.peers["target-1"] = late
        for request, answer in zip(wanted, await jobs, strict=True):
            assert answer == truth(request)
        assert local.actors["target-1"]._progress > 0


async def test_a_reader_that_falls_behind_gets_fewer_and_larger_steps(start, request_for) -> None:
    """It reads one step, and goes on when everything is decided: the second step is all the rest."""
    async with start() as local:
        request = request_for("slow", (1, 2, 3), max_tokens=60)
        answer = local.orchestrator.generate(request)
        first = await anext(answer)
        while not local.orchestrator._sessions["slow"].ended:
            await asyncio.sleep(0.01)
        rest = [delta async for delta in answer]
        assert len(rest) == 1
        assert [*first.tokens, *rest[0].tokens] == truth(request)
        assert len(rest[0].texts) == len(rest[0].origins) == len(rest[0].tokens)
        assert rest[0].finish == "length"
        assert rest[0].usage is not None
        assert (rest[0].usage.completion_tokens, rest[0].usage.passes > 2) == (60, True)
