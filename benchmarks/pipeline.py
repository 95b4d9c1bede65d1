"""`outrider bench`: ways of decoding side by side, against the limit, with where the lost time went."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from benchmarks.support.actor_rig import Rig, RigPlan, Run
    from benchmarks.support.load_runner import Lab
    from benchmarks.support.report import Section

    Scenario = Callable[[Lab], Coroutine[None, None, tuple[list[Section], Run]]]

OUT = Path("benchmarks/out")


class Name(StrEnum):
    """What can be measured."""

    one_sequence = "one-sequence"
    many = "many"
    overhead = "overhead"
    scaling = "scaling"
    saturation = "saturation"
    demo = "demo"
    all = "all"


def command(
    scenario: Annotated[Name, typer.Option(help="Which goals to measure.")] = Name.all,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; medians and ranges are reported.")] = 5,
    tokens: Annotated[int, typer.Option(min=16, help="one-sequence: length of an answer.")] = 600,
    pass_ms: Annotated[float, typer.Option(min=0.1, help="one-sequence: time of a target pass.")] = 25.0,
    step_ms: Annotated[float, typer.Option(min=0.1, help="one-sequence: time of a draft step.")] = 3.0,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="one-sequence: per draft token.")] = 0.8,
    spread: Annotated[float, typer.Option(min=0.0, max=0.5, help="one-sequence: acceptance varies by ± this.")] = 0.0,
    link_delay_ms: Annotated[float, typer.Option(min=0.0, help="Added to every delivery to a replica.")] = 0.0,
    wires: Annotated[bool, typer.Option(help="Mail and results over wires, or else through Ray.")] = True,
    trace: Annotated[
        Path | None, typer.Option(help="Write the last run's timeline here (open it in Perfetto).", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = OUT,
    in_process: Annotated[bool, typer.Option(help="Without Ray: a first look, not a measurement.")] = False,
) -> None:
    """Measure plain decoding, drafting in turn, a pipelined chain and an outcome tree in one run.

    Emulated hardware by default; `--scenario demo` measures the demo pair on this machine's CPU. Exit code 1 when a
    goal was missed.
    """
    from rich.console import Console

    from benchmarks import demo_pair, pipeline_scenarios
    from benchmarks.support import report, timeline
    from benchmarks.support.load_runner import Lab
    from deployments.runtime.local import ray_cluster

    console = Console()
    console.width = max(console.width, 130)  # a table that wraps cannot be read
    lab = Lab(_starter(in_process), repeats, link_delay_ms, wires, lambda line: console.print(line, style="dim"))
    scenarios: dict[Name, Scenario] = {
        Name.one_sequence: lambda lab: pipeline_scenarios.one_sequence(
            lab,
            pass_ms=pass_ms,
            step_ms=step_ms,
            acceptance=acceptance,
            spread=spread,
            hop_ms=2.0 + 2 * link_delay_ms,
            tokens=tokens,
        ),
        Name.many: pipeline_scenarios.many,
        Name.overhead: pipeline_scenarios.overhead,
        Name.scaling: pipeline_scenarios.scaling,
        Name.saturation: pipeline_scenarios.saturation,
        Name.demo: demo_pair.demo,
    }
    chosen = [name for name in scenarios if scenario in (name, Name.all)]

    async def measure() -> tuple[list[Section], Run | None]:
        sections: list[Section] = []
        run: Run | None = None
        for name in chosen:
            console.print(f"measuring {name.value}")
            found, run = await scenarios[name](lab)
            sections += found
        return sections, run

    # Ray runs its workers at low priority; on a machine with other work that is what would be measured.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with contextlib.nullcontext() if in_process else ray_cluster():
        sections, run = asyncio.run(measure())
    report.show(sections, console)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(report.to_json(sections), encoding="utf-8")
    plotted = report.plot(sections, out / "bench.png")
    console.print(f"written: {out / 'bench.json'}" + (f", {out / 'bench.png'}" if plotted else ""))
    if trace is not None and run is not None:
        timeline.write(run, trace)
        console.print(f"written: {trace} (open it at https://ui.perfetto.dev)")
    if not all(goal.reached for section in sections for goal in section.goals):
        raise typer.Exit(1)


def run(arguments: list[str]) -> int:
    """The command with `arguments`; returns its exit code."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    code = app(arguments, prog_name="outrider bench", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _starter(in_process: bool) -> Callable[[RigPlan], Awaitable[Rig]]:
    from benchmarks.support.actor_rig import LocalRig, RayRig

    return LocalRig.start if in_process else RayRig.start


if __name__ == "__main__":
    typer.run(command)
