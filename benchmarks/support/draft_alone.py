"""A draft's steps by themselves: the same model, trees and core as when it serves, and nothing else at work.

Set beside the steps of a served run, the difference is what serving costs a step: the target next to it (memory
bandwidth, caches), links, and this process's other threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.algorithms.outcome_tree import Forest
from actors.messages import OpenSequence, prefix_key
from actors.settings import SamplingSettings
from cluster.config.deployment import DeploymentConfig
from cluster.models.factory import draft_model, pin

STEPS_A_PASS = 4
TOKENS_A_PASS = 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over steps. seconds: wall clock; cpu_seconds: of the model thread; rows: nodes expanded, on average."""

    seconds: float
    cpu_seconds: float
    rows: float

    def told(self) -> str:
        """As text."""
        return f"{1e3 * self.seconds:.1f} ms ({1e3 * self.cpu_seconds:.1f} ms of processor, {self.rows:.1f} nodes)"


def step_times(steps: Sequence[tuple[float, float, int]]) -> StepTimes:
    """Of steps given as seconds, processor seconds and rows. Raises StatisticsError when there are none."""
    seconds, cpu, rows = zip(*steps, strict=True)
    return StepTimes(statistics.median(seconds), statistics.median(cpu), statistics.fmean(rows))


class DraftAlone:
    """Built where the draft would be placed: a Ray actor, or a plain object."""

    def __init__(self, config: DeploymentConfig) -> None:
        pin(config.draft.resources)
        self._model = draft_model(config)
        self._settings = config.resolved_draft()

    def run(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> StepTimes:
        """Follow the answers to some prompts, as if a pass committed two of their tokens every four steps."""
        steps: list[tuple[float, float, int]] = []
        for number, (prompt, answer) in enumerate(answers.items()):
            steps += self._follow(f"alone-{number}", prompt, answer)
        return step_times(steps)

    def _follow(self, name: str, prompt: tuple[int, ...], answer: Sequence[int]) -> list[tuple[float, float, int]]:
        model, tree = self._model, self._settings.tree
        forest = Forest(tree)
        model.open(OpenSequence(name, prompt, SamplingSettings(temperature=0), seed=0))
        forest.open(name, prefix_key(prompt), len(prompt))
        steps: list[tuple[float, float, int]] = []
        for done in range(0, len(answer), TOKENS_A_PASS):
            for _ in range(STEPS_A_PASS):
                requests = forest.frontier(tree.width)
                if not requests:
                    break
                started, cpu = time.monotonic(), time.thread_time()
                ranked = model.expand(requests)
                steps.append((time.monotonic() - started, time.thread_time() - cpu, len(requests)))
                forest.observe_step(len(requests), steps[-1][0])
                forest.grow(ranked)
            committed = tuple(answer[done : done + TOKENS_A_PASS])
            forest.commit(name, len(prompt) + done, committed)
            model.advance(name, committed)
        model.close(name)
        return steps[STEPS_A_PASS:]  # the first ones read the prompt
