"""A new draft on trial: it takes the place of the old one, and keeps it only if it commits more tokens per pass.

Knows neither Serve nor a terminal: the application, the measure and the clock are passed in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.errors import ConfigError, UnavailableError
from actors.messages import DRAFTED
from cluster.config.deployment import DraftChoice
from cluster.distillation.evaluation import is_better
from deployments.client.results import Result

POLL_S = 0.5


class Application(Protocol):
    """A running application whose draft can be exchanged."""

    def choice(self) -> DraftChoice:
        """The draft that it is to run."""
        ...

    def choose(self, choice: DraftChoice) -> None:
        """Run another draft, and touch nothing else. Raises UnavailableError when that fails."""
        ...

    def status(self) -> dict[str, Any]:
        """Both tiers as an orchestrator sees them."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens passes committed. passes: counted per sequence. squares: sum of the squares of these numbers."""

    passes: int = 0
    tokens: int = 0
    squares: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        """Of single passes."""
        return cls(len(lengths), sum(lengths), sum(length * length for length in lengths))

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(self.passes + other.passes, self.tokens + other.tokens, self.squares + other.squares)

    def __sub__(self, other: Lengths) -> Lengths:
        return Lengths(self.passes - other.passes, self.tokens - other.tokens, self.squares - other.squares)

    @property
    def length(self) -> float:
        """The acceptance length: the mean. 0 without passes."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def length_error(self) -> float:
        """Standard error of the mean, passes taken as independent; infinite for fewer than two."""
        if self.passes < 2:
            return math.inf
        variance = (self.squares - self.tokens * self.tokens / self.passes) / (self.passes - 1)
        return math.sqrt(max(variance, 0.0) / self.passes)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a trial."""

    old: DraftChoice
    new: DraftChoice
    before: Lengths
    after: Lengths
    kept: bool

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            name: {
                "draft": choice.model_dump(mode="json"),
                "passes": found.passes,
                "acceptance_length": found.length,
                "error": found.length_error,
            }
            for name, choice, found in (("old", self.old, self.before), ("new", self.new, self.after))
        } | {"kept": self.kept}


def roll_out(
    application: Application,
    choice: DraftChoice,
    measure: Callable[[], Lengths],
    *,
    report: Callable[[str], None] = lambda line: None,
    limit_s: float = 600.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Verdict:
    """Measure, exchange the draft, measure again; keep the new one if it is better by more than chance.

    limit_s: how long the new draft may take to come. Raises ConfigError when it is the one that runs, or no draft
    does; UnavailableError when it does not come. Whatever ends a trial early, the old draft is put back.
    """
    old = application.choice()
    if old == choice:
        raise ConfigError(f"{choice.model} is the draft that runs")
    if not _drafts(application.status()):
        raise ConfigError("no draft runs, so there is nothing to compare with: see `outrider status`")

    def put(wanted: DraftChoice) -> None:
        former = _drafts(application.status())
        application.choose(wanted)
        _await(application, former, wanted, clock() + limit_s, clock, sleep)

    report(f"measuring {old.model}")
    before = measure()
    try:
        report(f"putting {choice.model} in its place")
        put(choice)
        report(f"measuring {choice.model}")
        after = measure()
    except BaseException:
        report(f"putting {old.model} back")
        application.choose(old)
        raise
    kept = is_better(after, before)
    if not kept:
        report(f"putting {old.model} back")
        put(old)
    return Verdict(old, choice, before, after, kept)


def _drafts(status: Mapping[str, Any]) -> set[str]:
    return set(status["draft"]["replicas"])


def _await(
    application: Application,
    former: set[str],
    wanted: DraftChoice,
    deadline: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Until all drafts are others than `former`. Raises UnavailableError."""
    while True:
        status = application.status()
        present = _drafts(status)
        if present and present.isdisjoint(former):
            return
        if refused := {name: why for name, why in status["draft"]["refused"].items() if name not in former}:
            raise UnavailableError(f"{wanted.model} cannot be used: {next(iter(refused.values()))}")
        if clock() > deadline:
            raise UnavailableError(f"{wanted.model} did not come in time: see `outrider status`")
        sleep(POLL_S)


# -- measures ----------------------------------------------------------------------------------------------------------


def counted(status: Mapping[str, Any]) -> dict[str, Lengths]:
    """What each target replica has counted since it began."""
    return {
        name: Lengths(*(int(facts.get(key, 0)) for key in ("decided", "committed", "committed_squares")))
        for name, facts in status["target"]["replicas"].items()
    }


def since(before: Mapping[str, Lengths], now: Mapping[str, Lengths]) -> Lengths:
    """What was counted between two looks, by the replicas that were there at both."""
    return sum((now[name] - before[name] for name in now if name in before), Lengths())


def live(
    status: Callable[[], Mapping[str, Any]],
    passes: int,
    *,
    skip: int = 0,
    limit_s: float = 3600.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lengths:
    """Of the traffic as it comes, over at least so many passes. Raises UnavailableError if they take too long.

    skip: passes that are left out before, in which a draft that has just come catches up with what is under way.
    """
    first, deadline = counted(status()), clock() + limit_s
    while True:
        now = counted(status())
        found = since(first, now)
        if skip and found.passes >= skip:
            first, skip, found = now, 0, Lengths()
        if not skip and found.passes >= passes:
            return found
        if clock() > deadline:
            raise UnavailableError(
                f"{found.passes} passes in {limit_s:g} s, {passes} are needed: wait for traffic, or give --prompts FILE"
            )
        sleep(POLL_S)


def of_results(results: Sequence[Result]) -> Lengths:
    """Of answers, from the origin of every token: a pass ends with a token that is no draft's, or with the answer."""
    lengths: list[int] = []
    for result in results:
        length = 0
        for origin in result.origins:
            length += 1
            if origin not in DRAFTED:
                lengths.append(length)
                length = 0
        if length:
            lengths.append(length)
    return Lengths.of(lengths)
