"""Goals: what was wanted, what was measured, and the exit code that follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """What was wanted and what was measured."""

    text: str
    value: float
    wanted: float
    at_least: bool = True

    @property
    def reached(self) -> bool:
        """False for NaN: what was not measured is not reached."""
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    def __str__(self) -> str:
        mark, sign = "reached" if self.reached else "missed", ">=" if self.at_least else "<="
        return f"{mark}: {self.text}: {self.value:.3g} (goal {sign} {self.wanted:g})"


def exit_code(goals: Iterable[Goal]) -> int:
    """0, or 1 if one is missed."""
    return int(not all(goal.reached for goal in goals))


def print_goals(goals: Iterable[Goal]) -> int:
    """Print a line each; returns the exit code."""
    goals = list(goals)
    for goal in goals:
        print(goal)
    return exit_code(goals)
