"""How far a distillation is: a bar per stage on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from cluster.distillation.job import Progress, Report

PLAIN_PERIOD_S = 10.0
"""Between two lines of progress, where there is no terminal to draw on."""


@contextmanager
def shown() -> Iterator[Report]:
    """Whoever is told of progress, on standard error."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(file=sys.stderr)) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=1.0, note="")
            bars.update(tasks[progress.stage], completed=progress.done, note=figures(progress))
            if progress.note:
                bars.console.print(progress.note)

        yield draw


class Lines:
    """Progress as lines on standard error."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock()

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            typer.echo(f"{progress.stage}: {progress.note}", err=True)
        now = self._clock()
        if now < self._next and progress.done < 1:
            return
        self._next = now + PLAIN_PERIOD_S
        typer.echo(f"{progress.stage:<11} {progress.done:4.0%}  {figures(progress)}", err=True)


def figures(progress: Progress) -> str:
    """Tokens, their rate, loss, agreement and time left, as far as they are known."""
    parts = []
    if progress.tokens:
        parts.append(f"{progress.tokens:,} tokens")
    if progress.rate is not None:
        parts.append(f"{progress.rate:,.0f}/s")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.agreement is not None:
        parts.append(f"agreement {progress.agreement:.3f}")
    if progress.seconds_left:
        parts.append(f"{_duration(progress.seconds_left)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
