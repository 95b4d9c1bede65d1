"""Sixteen sequences at once on vLLM: what our sampler, the exchange and the draft each take from its throughput.

    python -m benchmarks vllm-saturation                 # about five minutes of two cores
    python -m benchmarks vllm-saturation --repeats 2     # a rougher look

The same target, prompts and cores as `python -m benchmarks vllm-pair`, in ways that differ by one thing each. vLLM
alone is there twice, because two of its processes that do the same may differ by a few percent: what all ways are
compared with is the median of both, and how far they are apart says what a difference means.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from actors import telemetry
from actors.messages import GenerationRequest
from actors.orchestrator.orchestrator import Orchestrator
from actors.settings import LookaheadSettings, SamplingSettings
from actors.telemetry import MemoryRecorder
from benchmarks.support import options
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.provenance import heading
from benchmarks.vllm_pair import CORES, SLOTS, Way, prepared, running
from cluster.config.deployment import DeploymentConfig
from cluster.models import factory, references

OFF = LookaheadSettings(mode="scheduled", maximum=4, schedule={1: 0}, wait="never")
"""The draft drafts, and the controller has none of it verified, at any load."""
_PART = telemetry.PASS_PART_SECONDS.name


@dataclass
class Spent:
    """Where the time of one way went, over all repeats; in seconds, and per pass where nothing else is said."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second, per repeat."""
    wall: float = 0.0
    """In all."""
    tokens: int = 0
    worker: float = 0.0
    """In vLLM's worker: the forward pass, and our sampler."""
    hold: float = 0.0
    exchange: list[float] = field(default_factory=list)
    """At the engine's end, for each pass, holds left out; empty without our worker."""
    draft: float = 0.0
    """In draft steps, in all."""

    @property
    def passes(self) -> float:
        """Without our worker nobody counts them, but each commits a token per sequence."""
        return len(self.exchange) or self.tokens / SLOTS


def ways(config: DeploymentConfig, lookahead: int) -> list[Way]:
    """Each adds one thing to the one before, up to the last."""
    ours = factory.vllm_model(config)
    ours = replace(ours, plan=replace(ours.plan, lookahead=lookahead))
    alone = replace(ours, plan=replace(ours.plan, lookahead=None))
    return [
        Way("vLLM alone", alone),
        Way("our sampler and exchange, no draft", ours),
        Way("a draft, and speculation turned off", ours, lambda: factory.draft_model(config), lookahead=OFF),
        Way("a draft, adaptive lookahead", ours, lambda: factory.draft_model(config)),
        Way("vLLM alone, once more", alone),
    ]


async def fill(orchestrator: Orchestrator, name: str, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """All slots at once; returns the tokens that were answered."""

    async def ask(i: int) -> int:
        sampling = SamplingSettings(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = GenerationRequest(f"{name}-{i}", sampling, tokens=tuple(prompts[i % len(prompts)]))
        return sum([len(delta.tokens) async for delta in orchestrator.generate(request)])

    return sum(await asyncio.gather(*(ask(i) for i in range(SLOTS))))


async def measure(
    chosen: Sequence[Way],
    config: DeploymentConfig,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    repeats: int,
    warm: int = 1,
) -> list[Spent]:
    """All ways are up at once and take turns, so that a machine that changes its speed changes all of them."""
    spent = [Spent() for _ in chosen]
    recorders = [MemoryRecorder() for _ in chosen]
    async with AsyncExitStack() as up:
        pairs = [
            await up.enter_async_context(running(way, config, recorder))
            for way, recorder in zip(chosen, recorders, strict=True)
        ]
        for repeat in range(-warm, repeats):
            for (orchestrator, target), found, recorder in zip(pairs, spent, recorders, strict=True):
                skipped = len(target.exchange_overhead())
                began = time.perf_counter()
                count = await fill(orchestrator, f"{repeat}", prompts, tokens)
                seconds = time.perf_counter() - began
                if repeat < 0:
                    recorder.sums.clear()
                    continue
                found.rates.append(count / seconds)
                found.wall += seconds
                found.tokens += count
                found.exchange += target.exchange_overhead()[skipped:]
    for found, recorder in zip(spent, recorders, strict=True):
        booked = max(recorder.total(telemetry.PASSES), 1.0)
        parts = {tags: value / booked for (name, tags), value in recorder.sums.items() if name == _PART}
        found.worker, found.hold = parts.get((("part", "forward"),), 0.0), parts.get((("part", "hold"),), 0.0)
        found.draft = recorder.total(telemetry.DRAFT_STEP_SECONDS)
    return spent


COLUMNS = ("over alone", "t/pass", "ms a pass", "worker", "exchange", "hold", "drafting")


def row(name: str, spent: Spent, base: float) -> str:
    """What neither worker, exchange nor hold takes of a pass is vLLM's scheduler and the way of the tokens.

    base: tokens per second of vLLM alone.
    """
    rate = statistics.median(spent.rates)
    cells = [f"{rate / base:.3f}x", f"{spent.tokens / spent.passes / SLOTS:.2f}"]
    cells.append(f"{1e3 * spent.wall / spent.passes:.2f}")
    if spent.exchange:
        each = (spent.worker, statistics.fmean(spent.exchange), spent.hold)
        cells += [f"{1e3 * seconds:.2f}" for seconds in each]
        cells.append(f"{spent.draft / spent.wall:.0%}")
    spread = f"({min(spent.rates):.1f}-{max(spent.rates):.1f})"
    return f"{name:<38}{rate:7.1f} {spread:<15}" + "".join(f"{cell:>11}" for cell in cells)


def main(argv: Sequence[str]) -> int:
    parser = options.parser("vllm-saturation", __doc__)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--warm", type=int, default=3, help="repeats before: what drafts are worth is found out")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the ways to run, from 0")
    chosen = parser.parse_args(argv)
    config, prompts = prepared(chosen.eager)
    print(heading(references.DEMO_TARGET))
    os.sched_setaffinity(0, {CORES[-1]})
    print(f"{SLOTS} at once, greedy, {chosen.tokens} tokens each; cores {CORES[0]} (worker) and {CORES[-1]} (the rest)")
    print(f"{'':<38}{'tokens/s':>7}{'':<15}" + "".join(f"{title:>11}" for title in COLUMNS))
    every = ways(config, chosen.lookahead)
    picked = [every[number] for number in chosen.only or range(len(every))]
    results = asyncio.run(measure(picked, config, prompts, chosen.tokens, chosen.repeats, chosen.warm))
    alone = [spent.rates for way, spent in zip(picked, results, strict=True) if way.model.plan.lookahead is None]
    base = statistics.median([rate for rates in alone or [results[0].rates] for rate in rates])
    for way, spent in zip(picked, results, strict=True):
        print(row(way.name, spent, base), flush=True)
    ours = [pair for pair in zip(picked, results, strict=True) if pair[0].model.plan.lookahead is not None]
    return print_goals(
        Goal(f"{way.name}, over vLLM alone", statistics.median(spent.rates) / base, 0.98) for way, spent in ours
    )
