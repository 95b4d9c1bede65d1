"""How far a batch is: a bar on a terminal or in a notebook, a line now and then in a log, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from deployments.client.results import Result

LINE_PERIOD_S = 10.0


class Progress(Protocol):
    """Told of every result."""

    def add(self, result: Result) -> None: ...

    def close(self) -> None: ...


class Tally:
    """What there is to tell: items, errors, tokens per second, acceptance length, time left."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self.total = total
        self.done = self.errors = self.tokens = self.passes = 0

    def add(self, result: Result) -> None:
        """Count one result."""
        self.done += 1
        self.errors += not result.ok
        self.tokens += result.usage.completion_tokens
        self.passes += result.usage.passes

    def text(self) -> str:
        """In one line."""
        seconds = max(self._clock() - self._started, 1e-9)
        parts = [f"{self.done}/{self.total}", f"{self.tokens / seconds:.0f} tokens/s"]
        if self.passes:
            parts.append(f"acceptance length {self.tokens / self.passes:.2f}")
        if self.done:
            parts.append(f"{seconds / self.done * (self.total - self.done):.0f} s left")
        if self.errors:
            parts.append(f"{self.errors} errors")
        return ", ".join(parts)


class Silent:
    """Says nothing."""

    def add(self, result: Result) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """For logs: a line every few seconds and one at the end, without control characters."""

    def __init__(self, total: int, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._tally = Tally(total, clock)
        self._out = out
        self._clock = clock
        self._last = clock()

    def add(self, result: Result) -> None:
        self._tally.add(result)
        if self._clock() - self._last >= LINE_PERIOD_S:
            self._say()

    def close(self) -> None:
        self._say()

    def _say(self) -> None:
        self._last = self._clock()
        print(self._tally.text(), file=self._out, flush=True)


class Bar:
    """For terminals and notebooks."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._tally = Tally(total)
        self._bar = RichProgress(
            BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), console=Console(stderr=True)
        )
        self._task: Any = self._bar.add_task(self._tally.text(), total=total)
        self._bar.start()

    def add(self, result: Result) -> None:
        self._tally.add(result)
        self._bar.update(self._task, advance=1, description=self._tally.text())

    def close(self) -> None:
        self._bar.stop()


def progress_for(total: int, wanted: bool | None) -> Progress:
    """A bar where one can be drawn; lines where a bar was asked for and cannot be drawn; otherwise silence."""
    drawable = sys.stderr.isatty() or "ipykernel" in sys.modules
    if wanted is False or (wanted is None and not drawable) or total == 0:
        return Silent()
    return Bar(total) if drawable else Lines(total, sys.stderr)
