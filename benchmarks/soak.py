"""Does anything leak over time, faults included? A checked load runs for minutes, and what grew is drawn.

    python -m benchmarks soak --minutes 5

Every process of the application is sampled: resident memory, open files and threads. A fault strikes every half
minute; processes come and go, so that what is drawn is each process by itself. At the end everything must have been
given back, and the growth of every process that lived through the second half is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.support import emulated_application, fault_schedule, options
from benchmarks.support.checked_load import CheckedLoad, Told
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.processes import KINDS, ApplicationProcess, Kind, find
from deployments.client.http_service import HttpService
from deployments.runtime.local import application, free_port, ray_cluster

WATCHED: tuple[Kind, ...] = (*KINDS, "proxy")
PERIOD_S = 5.0
NAME = "soak"


@dataclass
class Track:
    """One process over time: (seconds, MiB resident, open files, threads)."""

    kind: str
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)


def sample(tracks: dict[int, Track], victims: Sequence[ApplicationProcess], now: float) -> None:
    """Add a sample of every process that still exists."""
    for victim in victims:
        try:
            process = psutil.Process(victim.pid)
            with process.oneshot():
                values = (process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
        except psutil.NoSuchProcess:
            continue
        tracks.setdefault(victim.pid, Track(victim.kind)).samples.append((now, *values))


async def watch(tracks: dict[int, Track], stop: asyncio.Event) -> None:
    """Sample until told to stop. Frozen processes do not answer who they are, and keep their former name."""
    began, known = time.monotonic(), dict[int, ApplicationProcess]()
    while not stop.is_set():
        for found in await asyncio.gather(*(find(NAME, kind) for kind in WATCHED)):
            known.update({victim.pid: victim for victim in found})
        await asyncio.to_thread(sample, tracks, list(known.values()), time.monotonic() - began)
        try:
            await asyncio.wait_for(stop.wait(), PERIOD_S)
        except TimeoutError:
            continue


async def soak(
    url: str, minutes: float, streams: int, fault_every_s: float, freeze_s: float, say: Console
) -> tuple[dict[int, Track], Told]:
    """Load, faults and samples for `minutes`; then everything must be at rest."""
    service, tracks, stop = HttpService(url), dict[int, Track](), asyncio.Event()
    load = CheckedLoad(service, emulated_application.request, emulated_application.truth, streams)
    watching = asyncio.create_task(watch(tracks, stop))
    deadline, chance = time.monotonic() + 60 * minutes, random.Random(1)
    for pause, fault in fault_schedule.schedule(1, 1000, spacing_s=fault_every_s):
        if time.monotonic() + pause + 20 > deadline:
            break
        await asyncio.sleep(pause)
        struck = await fault_schedule.strike(NAME, fault, chance, thaw_after_s=freeze_s)
        say.print(f"{fault}: {struck.victim.name}", style="dim")
    await asyncio.sleep(max(0.0, deadline - time.monotonic()))
    told = await load.stop()
    await emulated_application.at_rest(NAME)
    if left := await emulated_application.held(service):
        raise SystemExit(f"{left} sessions and sequences were never given back")
    stop.set()
    await watching
    await service.close()
    return tracks, told


def plot(tracks: dict[int, Track], path: Path) -> None:
    """Resident memory and handles of every process, by kind."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(WATCHED), figsize=(3.2 * len(WATCHED), 6), sharex=True, squeeze=False)
    for column, kind in enumerate(WATCHED):
        for track in tracks.values():
            if track.kind == kind:
                times = [at / 60 for at, *_ in track.samples]
                axes[0][column].plot(times, [mib for _, mib, _, _ in track.samples])
                axes[1][column].plot(times, [files for _, _, files, _ in track.samples])
        axes[0][column].set_title(kind)
        axes[1][column].set_xlabel("minutes")
        for axis in (axes[0][column], axes[1][column]):
            axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axes[0][0].set_ylabel("resident, MiB")
    axes[1][0].set_ylabel("open files")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> int:
    """Run, draw and print."""
    parser = options.parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=options.at_least(1), default=16)
    parser.add_argument("--pass-ms", type=float, help="of a target pass, instead of what one core can carry")
    parser.add_argument("--fault-every", type=float, default=30.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    given = parser.parse_args(argv)
    console = Console()
    console.width = max(console.width, 110)
    config = emulated_application.config(NAME, free_port(), given.streams, given.pass_ms)
    freeze = emulated_application.freeze_s(config)
    with ray_cluster(), application(config) as url:
        tracks, told = asyncio.run(soak(url, given.minutes, given.streams, given.fault_every, freeze, console))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "soak.json").write_text(json.dumps({pid: [t.kind, t.samples] for pid, t in tracks.items()}))
    plot(tracks, given.out / "soak.png")
    table = Table(
        title=f"Growth in the second half of {given.minutes:g} minutes ({platform.machine()}, {os.cpu_count()} cores)"
    )
    for column in ("process", "lived, min", "resident, MiB", "change", "open files", "change", "threads", "change"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for pid, track in sorted(tracks.items(), key=lambda item: item[1].kind):
        half = [one for one in track.samples if one[0] >= 30 * given.minutes]
        if len(half) < 2 or track.samples[0][0] > 30 * given.minutes:
            continue
        first, last = half[0], half[-1]
        cells = [f"{track.kind} {pid}", f"{(last[0] - track.samples[0][0]) / 60:.1f}"]
        for place, form in ((1, ".1f"), (2, "d"), (3, "d")):
            cells += [format(last[place], form), format(last[place] - first[place], "+" + form)]
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"{told.answers} answers, lost {len(told.lost)}, changed {len(told.changed)}, broken {len(told.broken)}; "
        f"written: {given.out / 'soak.png'}"
    )
    return print_goals(
        [
            Goal("answers lost", len(told.lost), 0, at_least=False),
            Goal("answers changed", len(told.changed), 0, at_least=False),
        ]
    )
