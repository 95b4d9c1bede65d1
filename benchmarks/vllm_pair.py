"""vLLM alone, vLLM with its own draft in the same process, and vLLM with Outrider's remote draft: one run, one pair.

    python -m benchmarks vllm-pair                                   # about seven minutes of two cores
    python -m benchmarks vllm-pair --repeats 1 --tokens 24    # a rougher look

The target (and a draft inside vLLM) has one core; the remote draft has the other one, as a cheap device beside a dear
one. vLLM's scheduler and the actors are there too, and go first (`nice`). Greedy, the demo pair. Then the same with a
draft of known cost and quality (support/scripted_draft.py), because on a CPU a draft step of the demo pair is not
as much cheaper than a pass as it is between two GPUs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.draft.actor import DraftActor
from actors.engines.protocol import DraftModel
from actors.engines.vllm.runtime import VllmModel
from actors.messages import GenerationRequest
from actors.orchestrator.admission import Admission
from actors.orchestrator.orchestrator import Orchestrator
from actors.orchestrator.replica_pool import StaticDirectory
from actors.settings import DraftSettings, LookaheadSettings, OrchestratorSettings, SamplingSettings, TreeSettings
from actors.telemetry import MemoryRecorder, Recorder
from actors.transport.links import LocalPeer
from benchmarks.demo_pair import CHAT
from benchmarks.support import options
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.measured_vllm import MeasuredVllmTarget
from benchmarks.support.provenance import heading
from benchmarks.support.scripted_draft import Script, ScriptedDraft
from cluster.config.deployment import DeploymentConfig, Resources, load_config
from cluster.models import factory, references, weights
from cluster.observability.quantiles import quantile

SLOTS, CONTEXT = 16, 512
CONFIG = {
    "target": {"engine": "vllm", "settings": {"slots": SLOTS, "context": CONTEXT}},
    "draft": {"settings": {"slots": SLOTS, "context": CONTEXT}},
}
CORES = sorted(os.sched_getaffinity(0))[:2]
"""The first is the target's, the last everybody else's: the remote draft's, the actors' and the orchestrator's."""


@dataclass
class Measured:
    """One way of decoding."""

    single: list[float] = field(default_factory=list)
    """Tokens per second of one sequence, per repeat."""
    full: list[float] = field(default_factory=list)
    """Tokens per second of all slots together, per repeat."""
    answers: list[list[int]] = field(default_factory=list)
    passes: int = 0
    tokens: int = 0
    overhead_s: list[float] = field(default_factory=list)


@dataclass
class Way:
    """How to decode: a target, and perhaps a draft beside it."""

    name: str
    model: VllmModel
    draft: Callable[[], DraftModel] | None = None
    cores: str = str(CORES[0])
    saturate: bool = False
    draft_settings: DraftSettings = field(default_factory=lambda: DraftSettings(slots=SLOTS, context=CONTEXT))
    lookahead: LookaheadSettings | None = None
    """None: adaptive, up to what the model's plan allows."""


@asynccontextmanager
async def running(
    way: Way, config: DeploymentConfig, recorder: Recorder
) -> AsyncIterator[tuple[Orchestrator, MeasuredVllmTarget]]:
    """Both tiers in this process, vLLM's ranks bound to the way's cores."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = way.cores
    settings = config.resolved_target()
    if way.model.plan.lookahead is not None:
        lookahead = way.lookahead or LookaheadSettings(mode="adaptive", maximum=way.model.plan.lookahead)
        settings = settings.model_copy(update={"lookahead": lookahead})
    target = MeasuredVllmTarget("target", lambda: way.model, settings, recorder)
    drafts = {}
    if way.draft is not None:
        make, cores = way.draft, Resources(cores=(CORES[-1],), threads=1, nice=10)

        def build() -> DraftModel:
            factory.pin(cores)
            return make()

        drafts["draft"] = DraftActor("draft", build, way.draft_settings, recorder)
    for actor in (target, *drafts.values()):
        actor.start()
    orchestrator = Orchestrator(
        targets=StaticDirectory({"target": LocalPeer(target)}),
        drafts=StaticDirectory({name: LocalPeer(actor) for name, actor in drafts.items()}),
        admission=Admission(factory.text_facts(config).codec, way.model.vocabulary, CONTEXT),
        settings=OrchestratorSettings(discovery_period_s=0.05),
        recorder=recorder,
    )
    try:
        await target.card()
        await orchestrator.start()
        while drafts and not orchestrator.status()["draft"]["replicas"]:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.05)
        yield orchestrator, target
    finally:
        await orchestrator.stop()
        await target.stop()
        await asyncio.gather(*(actor.stop() for actor in drafts.values()))


async def ask(orchestrator: Orchestrator, name: str, prompt: Sequence[int], tokens: int, found: Measured) -> list[int]:
    """One greedy answer."""
    sampling = SamplingSettings(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    answer: list[int] = []
    async for delta in orchestrator.generate(GenerationRequest(name, sampling, tokens=tuple(prompt))):
        answer.extend(delta.tokens)
        found.passes += 1
    found.tokens += len(answer)
    return answer


async def measure(
    way: Way, config: DeploymentConfig, prompts: Sequence[Sequence[int]], tokens: int, repeats: int
) -> Measured:
    """Run one way: single sequences one after another, then all slots at once."""
    found = Measured()
    async with running(way, config, MemoryRecorder()) as (orchestrator, target):
        await ask(orchestrator, "warm", prompts[0], 8, Measured())
        for repeat in range(repeats):
            began = time.perf_counter()
            found.answers = [
                await ask(orchestrator, f"{repeat}-{i}", prompt, tokens, found) for i, prompt in enumerate(prompts)
            ]
            found.single.append(len(prompts) * tokens / (time.perf_counter() - began))
        found.overhead_s = target.exchange_overhead()
        for repeat in range(repeats if way.saturate else 0):
            many = [prompts[i % len(prompts)] for i in range(SLOTS)]
            began = time.perf_counter()
            await asyncio.gather(
                *(ask(orchestrator, f"{repeat}-full-{i}", p, tokens, Measured()) for i, p in enumerate(many))
            )
            found.full.append(SLOTS * tokens / (time.perf_counter() - began))
    return found


def ways(config: DeploymentConfig, folder: Path, lookahead: int) -> list[Way]:
    """The demo pair, in every way."""
    ours = factory.vllm_model(config)
    ours = replace(ours, plan=replace(ours.plan, lookahead=lookahead))
    alone = replace(ours, plan=replace(ours.plan, lookahead=None))
    own = {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": lookahead}
    colocated = replace(alone, plan=replace(alone.plan, own_speculation=own))
    return [
        Way("vLLM alone, one core", alone, saturate=True),
        Way("vLLM alone, both cores", alone, cores=",".join(map(str, CORES))),
        Way("vLLM's own draft_model, one core", colocated),
        Way("Outrider, remote draft", ours, lambda: factory.draft_model(config), saturate=True),
    ]


def scripted_ways(config: DeploymentConfig, script: Script) -> list[Way]:
    """The same target with the scripted draft, inside vLLM and beside it."""
    ours = factory.vllm_model(config)
    alone = replace(ours, plan=replace(ours.plan, lookahead=None))
    own = {
        "method": "custom_class",
        "model": "benchmarks.support.scripted_draft.ColocatedDraft",
        "num_speculative_tokens": script.lookahead,
    }
    chain = DraftSettings(slots=SLOTS, context=CONTEXT, tree=TreeSettings(branching=1))
    return [
        Way("scripted draft inside vLLM", replace(alone, plan=replace(alone.plan, own_speculation=own))),
        Way(
            "scripted draft, remote",
            ours,
            lambda: ScriptedDraft(script, SLOTS, CONTEXT),
            draft_settings=chain,
        ),
    ]


def save_draft(folder: Path) -> None:
    """The demo draft as a checkpoint that vLLM reads (with the target's whole head)."""
    import torch

    module, _ = weights.load_draft(references.DEMO_DRAFT, torch.float32)
    module.save_pretrained(folder / "draft")


def row(name: str, found: Measured, base: Measured | None) -> str:
    speed = statistics.median(found.single)
    spread = f"{min(found.single):.1f}-{max(found.single):.1f}"
    over = f"{speed / statistics.median(base.single):5.2f}x" if base else "      "
    full = f"{statistics.median(found.full):8.1f}" if found.full else ""
    return f"{name:<36}{speed:7.1f} ({spread}){over:>9}{found.tokens / max(found.passes, 1):7.2f}{full:>10}"


def prepared(eager: bool) -> tuple[DeploymentConfig, list[tuple[int, ...]]]:
    """The demo pair with its models fetched, and the chat prompts as token ids."""
    raw = {**CONFIG, "target": {**CONFIG["target"], "engine_kwargs": {"enforce_eager": eager}}}
    config = load_config(raw)
    factory.prepare(config)
    codec = factory.text_facts(config).codec
    return config, [codec.encode_chat([{"role": "user", "content": text}]) for text in CHAT]  # type: ignore[union-attr]


def main(argv: Sequence[str]) -> int:
    parser = options.parser("vllm-pair", __doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="per answer")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.8, help="of the scripted draft")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the scripted draft")
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation")
    chosen = parser.parse_args(argv)
    config, prompts = prepared(chosen.eager)
    print(heading(references.DEMO_TARGET))
    os.sched_setaffinity(0, {CORES[-1]})  # of vLLM's ranks, vLLM binds the threads elsewhere
    print(f"draft {references.DEMO_DRAFT}, greedy, {chosen.tokens} tokens, k = {chosen.lookahead}")
    print(f"{'':<36}{'tokens/s, one sequence':>22}{'':>9}{'t/pass':>7}{'16 at once':>10}", flush=True)
    results: dict[str, Measured] = {}

    def run(way: Way) -> None:
        results[way.name] = found = asyncio.run(measure(way, config, prompts, chosen.tokens, chosen.repeats))
        print(row(way.name, found, next(iter(results.values()))), flush=True)

    with tempfile.TemporaryDirectory() as place:
        save_draft(Path(place))
        for way in ways(config, Path(place), chosen.lookahead):
            run(way)
        alone = results["vLLM alone, one core"]
        script = Script(
            chosen.acceptance,
            chosen.step_ms / 1e3,
            chosen.lookahead,
            factory.vllm_model(config).vocabulary,
            [(list(prompt), answer) for prompt, answer in zip(prompts, alone.answers, strict=True)],
        )
        script.save(Path(place) / "script.json")
        for way in scripted_ways(config, script):
            run(way)
    return print_goals(goals(results))


def goals(results: dict[str, Measured]) -> list[Goal]:
    """What was reached. Prints how many answers are vLLM's own, and the exchange's median."""
    alone, colocated = results["vLLM alone, one core"], results["vLLM's own draft_model, one core"]
    ours, inside = results["Outrider, remote draft"], results["scripted draft inside vLLM"]
    remote = results["scripted draft, remote"]
    drafted = [*ours.answers, *remote.answers]
    same = sum(a == b for a, b in zip(drafted, [*alone.answers, *alone.answers], strict=True))
    print(f"{same} of {len(drafted)} answers with remote drafts are token for token those of vLLM alone")
    spent = [1e3 * s for s in ours.overhead_s]
    tail = quantile(spent, 0.95)
    print(f"exchange per pass: median {statistics.median(spent):.2f} ms, 95th percentile {tail:.2f} ms")
    return [
        Goal("remote draft over one inside vLLM, demo pair", _over(ours.single, colocated.single), 1.2),
        Goal("remote draft over one inside vLLM, scripted", _over(remote.single, inside.single), 1.2),
        Goal("16 at once over vLLM alone", _over(ours.full, alone.full), 0.98),
        Goal("exchange per pass, median ms", statistics.median(spent), 2.0, at_least=False),
    ]


def _over(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(one) / statistics.median(other)
