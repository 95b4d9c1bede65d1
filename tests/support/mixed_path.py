"""The law of each token given what its pass was for, where sequences with and without drafts share passes.

Under a rule that draws draft tokens, a token follows p given all that was settled before it: the tokens before it, what
its pass was for (a probe, a trial, off), and whether a draft token was verified in its place. So tokens are counted by
all of these. Were a drawn token to have a say in whether it is verified, those verified would not follow p, nor those
left alone. Counts are compared with p row by row: given the row, each token is a new draw, so the statistic is a chi
square (of a martingale's increments) however many tokens come to a row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import get_args

import numpy as np
import torch
from engine_path import Clock, ToyDraft, ToyTarget
from lossy_path import Answer, LossyPath
from numpy.typing import NDArray
from scipy import stats
from toy_models import ToyModel

from actors.algorithms.control.lookahead import LookaheadController, Phase
from actors.messages import OpenSequence
from actors.settings import LookaheadSettings, Rule, SamplingSettings, TargetSettings, TreeSettings

ALONE = "alone "
"""Begins the names of sequences without speculation."""

PHASES: tuple[Phase, ...] = get_args(Phase)


class ChainModel(ToyModel):
    """The next token depends on the last one alone. rows: its distribution, [V, V]; those after 1 and 2 are equal."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        super().__init__(len(rows))
        self.rows = np.array(rows)
        self._logits = torch.from_numpy(np.log(self.rows))

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return self._logits[prefix[-1]]


TARGET = ChainModel([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1], [0.3, 0.6, 0.1]])
DRAFT = ChainModel([[0.8, 0.1, 0.1], [0.45, 0.01, 0.54], [0.45, 0.01, 0.54]])
"""After a 0 the draft is sure and right, after other tokens it draws either 0 or 2 and is accepted in 0.41: what is
behind a draw tells which it was."""


class TryingLookahead(LookaheadController):
    """Also tries by the (simulated) wall clock whether drafts pay, as the broker does for engines of their own pace;
    and probes often."""

    def __init__(self, settings: LookaheadSettings, rule: Rule) -> None:
        super().__init__(settings, rule, probe_after=4)
        self._committed = 0

    def observe_block(self, sequence: str, confidences: Sequence[float], accepted: int, branches: int = 0) -> None:
        super().observe_block(sequence, confidences, accepted, branches)
        self._committed += accepted

    def observe_pass(self, tokens: int, rows: int, seconds: float, prompt_tokens: int = 0) -> None:
        super().observe_pass(tokens, rows, seconds, prompt_tokens)
        self.observe_progress(rows, rows + self._committed, seconds, full=True)
        self._committed = 0


class HalvingLookahead(TryingLookahead):
    """A fault that was once shipped, the negative control: k is chosen with all confidences in sight and then halved by
    a probe, which every pass is (where halving changed a pass by less than a quarter, it was tried again in the next);
    and the bar is what sequences with drafts commit, by the time of all."""

    def plan(self, paths: Mapping[str, Sequence[float]], plain_tokens: int, *rest: object) -> dict[str, int]:
        gains = [(-reach, name) for name, path in paths.items() for reach in accumulate(self._trusted(name, path), mul)]
        chosen = dict.fromkeys(paths, 0)
        committed, seconds = float(len(paths)), self.cost(plain_tokens)
        for negative, name in sorted(gains):
            if -negative * seconds < committed * self.cost.slope:
                break
            chosen[name] += 1
            committed, seconds = committed - negative, seconds + self.cost.slope
        return {name: k // 2 for name, k in chosen.items()}


@dataclass
class MixedPath:
    """Runs `drafting` sequences beside `alone` ones without speculation, of `length` tokens each, through LossyPath.

    slope: what a token adds to a pass of 1 s; it decides how much the controller cuts.
    """

    rule: Rule
    drafting: int
    alone: int
    slope: float
    seed: int
    controller: Callable[[LookaheadSettings, Rule], LookaheadController] = TryingLookahead
    length: int = 48
    found: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, len(PHASES), 2, 2), dtype=np.int64))
    """Tokens by: verified or not, phase of the pass, the token before (0 or not), the token itself."""

    def run(self, tokens: int) -> NDArray[np.int64]:
        """Count at least so many tokens of sequences with drafts, and return the counts so far."""
        rng, clock, slots = random.Random(self.seed), Clock(), self.drafting + self.alone
        settings = TargetSettings(
            slots=slots, context=64, queue=tokens, rule=self.rule, lookahead=LookaheadSettings(maximum=8)
        )
        tree = TreeSettings(width=4 * slots, branching=2, depth=9, nodes=48)
        target, draft = ToyTarget(TARGET, self.rule, clock, self.slope, slots), ToyDraft(DRAFT, self.rule, 2)
        path = LossyPath(target, draft, settings, rng, tree=tree, clock=clock, controller=self.controller)
        for name, answer in path.run(list(self._openings(tokens, rng))).items():
            if not name.startswith(ALONE):
                self._count(answer)
        return self.found

    def _openings(self, tokens: int, rng: random.Random) -> Iterable[OpenSequence]:
        with_drafts = SamplingSettings(max_tokens=self.length)
        without = with_drafts.model_copy(update={"speculation": False})
        rounds = -(-tokens // (self.length * max(1, self.drafting)))
        for n in range(rounds):
            for i in range(self.drafting + self.alone):
                drafted = i < self.drafting
                name, sampling = ("", with_drafts) if drafted else (ALONE, without)
                yield OpenSequence(f"{name}{n}-{i}", (1,), sampling, rng.randrange(2**63))

    def _count(self, answer: Answer) -> None:
        others = np.minimum([1, *answer.tokens], 1)  # 1 stands for every token but 0
        phases = [PHASES.index(phase) for phase in answer.phases]
        np.add.at(self.found, (np.array(answer.tested, dtype=int), phases, others[:-1], others[1:]), 1)


def laws(rule: Rule) -> NDArray[np.float64]:
    """What tokens follow, [2, 2, 2]: not verified or verified; the token before is 0 or not; the token is 0 or not.

    Typical acceptance takes every draft token that the target gives more than 0.09, which here are all.
    """
    target, draft = ([[row[0], 1 - row[0]] for row in model.rows[:2]] for model in (TARGET, DRAFT))
    return np.array([target, draft if rule == "typical" else target])


def fit_by_row(found: NDArray[np.int64], law: NDArray[np.float64], rule: Rule) -> float:
    """p-value of the counts [2, phases, 2, 2], rows that are expected to hold less than five of a token left out.

    The coupled rule's tokens are those of its noise, whatever is verified, and the drafts know that noise: what is
    verified tells about the token, and changes none. So they are not told apart by that, nor by phase.
    """
    if rule == "coupled":
        found = found.sum(axis=(0, 1), keepdims=True)
        law = law[:1]
    expected = law[:, None] * found.sum(axis=-1, keepdims=True)
    sound = expected.min(axis=-1) >= 5
    observed, expected = found[sound], expected[sound]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, observed.shape[0] * (observed.shape[1] - 1)))
