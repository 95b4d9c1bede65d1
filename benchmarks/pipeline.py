"""Ways of decoding side by side, against the limit, with where the lost time went.

    python -m benchmarks one-sequence --repeats 2
    python -m benchmarks pipeline --out DIR         # one-sequence, many, overhead, scaling, saturation and demo

Plain decoding, drafting in turn, a pipelined chain and an outcome tree are measured in one run. Emulated hardware,
but for `demo`, which measures the demo pair on this machine's CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import demo_pair, pipeline_scenarios
from benchmarks.support import options, report, timeline
from benchmarks.support.actor_rig import LocalRig, RayRig, Rig, RigPlan, Run
from benchmarks.support.goals import exit_code
from benchmarks.support.load_runner import Lab
from benchmarks.support.report import Section
from deployments.runtime.local import ray_cluster

Scenario = Callable[[Lab], Coroutine[None, None, tuple[list[Section], Run]]]
OUT = Path("benchmarks/out")
NAMES = ("one-sequence", "many", "overhead", "scaling", "saturation", "demo")
ALL = "pipeline"


def main(argv: Sequence[str]) -> int:
    """Measure what the first argument names. Returns 1 when a goal was missed."""
    given = _parser().parse_args(argv)
    console = Console()
    console.width = max(console.width, 130)  # a table that wraps cannot be read
    start: Callable[[RigPlan], Awaitable[Rig]] = LocalRig.start if given.in_process else RayRig.start
    lab = Lab(
        start, given.repeats, given.link_delay_ms, not given.no_wires, lambda line: console.print(line, style="dim")
    )
    scenarios = _scenarios(given)

    async def measure() -> tuple[list[Section], Run | None]:
        sections: list[Section] = []
        run: Run | None = None
        for name in NAMES:
            if given.name in (name, ALL):
                console.print(f"measuring {name}")
                measured, run = await scenarios[name](lab)
                sections += measured
        return sections, run

    # Ray runs its workers at low priority; on a machine with other work that is what would be measured.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with contextlib.nullcontext() if given.in_process else ray_cluster():
        sections, run = asyncio.run(measure())
    report.show(sections, console)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "bench.json").write_text(report.to_json(sections), encoding="utf-8")
    plotted = report.plot(sections, given.out / "bench.png")
    console.print(f"written: {given.out / 'bench.json'}" + (f", {given.out / 'bench.png'}" if plotted else ""))
    if given.trace is not None and run is not None:
        timeline.write(run, given.trace)
        console.print(f"written: {given.trace} (open it at https://ui.perfetto.dev)")
    return exit_code(goal for section in sections for goal in section.goals)


def _parser() -> argparse.ArgumentParser:
    parser, ms = options.parser("", __doc__), options.at_least(0.1, float)
    parser.add_argument("name", choices=(*NAMES, ALL))
    parser.add_argument("--repeats", type=options.at_least(1), default=5, help="runs of each, for medians and ranges")
    parser.add_argument("--tokens", type=options.at_least(16), default=600, help="one-sequence: length of an answer")
    parser.add_argument("--pass-ms", type=ms, default=25.0, help="one-sequence: time of a target pass")
    parser.add_argument("--step-ms", type=ms, default=3.0, help="one-sequence: time of a draft step")
    parser.add_argument("--acceptance", type=options.share, default=0.8, help="one-sequence: per draft token")
    parser.add_argument("--spread", type=options.share, default=0.0, help="one-sequence: acceptance varies by ± this")
    parser.add_argument(
        "--link-delay-ms", type=options.at_least(0.0, float), default=0.0, help="added to every delivery to a replica"
    )
    parser.add_argument("--no-wires", action="store_true", help="mail and results through Ray")
    parser.add_argument("--trace", type=Path, help="write the last run's timeline here (open it in Perfetto)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for bench.json and bench.png")
    parser.add_argument("--in-process", action="store_true", help="without Ray: a first look, not a measurement")
    return parser


def _scenarios(given: argparse.Namespace) -> dict[str, Scenario]:
    return {
        "one-sequence": lambda lab: pipeline_scenarios.one_sequence(
            lab,
            pass_ms=given.pass_ms,
            step_ms=given.step_ms,
            acceptance=given.acceptance,
            spread=given.spread,
            hop_ms=2.0 + 2 * given.link_delay_ms,
            tokens=given.tokens,
        ),
        "many": pipeline_scenarios.many,
        "overhead": pipeline_scenarios.overhead,
        "scaling": pipeline_scenarios.scaling,
        "saturation": pipeline_scenarios.saturation,
        "demo": demo_pair.demo,
    }
