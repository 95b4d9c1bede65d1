"""Does speculation pay, with how much lookahead, and how many drafts does a target want?

Plain decoding and taking turns are closed forms; run-ahead is simulated (cluster.planning.simulator: the real
scheduler, lookahead and outcome trees on a clock that jumps). What the simulation leaves out, an orchestrator's and
Python's own time, comes on top: about a millisecond a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from actors.engines.emulated.language import Agreement
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.settings import LookaheadSettings, Rule, Settings, TreeSettings
from cluster.planning.simulator import SimulationInput, SimulationResult, plain_rate, simulate

Method = Literal["plain", "in turn", "chain", "tree"]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]

RATIOS = ((4, 1), (2, 1), (1, 1), (1, 2), (1, 4))
"""Targets and drafts that are tried together."""


class PlanInput(Settings):
    """Measured or assumed times, and what the hardware costs."""

    target: TargetSpec = TargetSpec()
    """A pass takes pass_ms + token_ms · tokens."""
    draft: DraftSpec = DraftSpec()
    """A step takes step_ms + row_ms · nodes. Its agreement is replaced by those of `agreements`."""
    hop_ms: Annotated[float, Field(ge=0, le=1000)] = 2.0
    """From a target to a draft and back."""
    agreements: dict[Rule, Agreement] = {"coupled": Agreement()}
    """Per acceptance rule, how often the draft's guesses come true."""
    sequences: Annotated[int, Field(ge=1, le=512)] = 1
    """Running at once on each target."""
    lookaheads: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1)] = (2, 4, 8)
    tree: TreeSettings = TreeSettings()
    verifies_trees: bool = True
    """False for an engine that verifies the best path alone: vLLM."""
    target_gpus: Annotated[int, Field(ge=1)] = 1
    """Per replica."""
    draft_gpus: Annotated[float, Field(ge=0)] = 1.0
    target_gpu_hour: Price = 0.0
    """Price of one GPU of a target for an hour, in any currency. 0: prices are not known."""
    draft_gpu_hour: Price = 0.0
    effort: Annotated[int, Field(ge=50, le=100_000)] = 600
    """Passes times sequences that each figure rests on; its error falls with the square root (about 4 % at 600)."""

    def hourly(self, targets: int, drafts: int) -> float:
        """Price of so many replicas for an hour."""
        return targets * self.target_gpus * self.target_gpu_hour + drafts * self.draft_gpus * self.draft_gpu_hour


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One way to run. Rates are per target replica; cost is per million tokens, None without prices."""

    rule: Rule | None
    method: Method
    lookahead: int
    targets: int
    drafts: int
    speedup: float
    tokens_per_second: float
    tokens_per_pass: float
    target_busy: float
    draft_busy: float
    cost: float | None

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of HEADER."""
        return (
            self.rule or "-",
            self.method,
            str(self.lookahead) if self.lookahead else "-",
            f"{self.drafts}:{self.targets}" if self.drafts else "-",
            f"{self.speedup:.2f}x",
            f"{self.tokens_per_second:.0f}",
            f"{self.tokens_per_pass:.2f}",
            f"{self.target_busy:.0%}",
            f"{self.draft_busy:.0%}" if self.drafts else "-",
            "-" if self.cost is None else f"{self.cost:.3g}",
        )


HEADER = (
    "rule",
    "method",
    "lookahead",
    "drafts:targets",
    "speed-up",
    "tokens/s",
    "tokens/pass",
    "target busy",
    "draft busy",
    "per 1M tokens",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to expect. Rows are grouped by rule: plain, in turn, chain, tree, then the tree by drafts per target."""

    rows: tuple[PlanRow, ...]
    break_even: dict[Rule, float | None]
    """Sequences in one pass from which on no draft token is worth verifying; None: never."""
    best: PlanRow
    """Cheapest per token where prices are known, else the fastest with no more than two drafts a target."""

    @property
    def pays(self) -> bool:
        """Is the best way to run a speculative one?"""
        return self.best.method != "plain"

    def table(self) -> list[tuple[str, ...]]:
        """HEADER and one line per row; columns that say the same of every speculative row are left out."""
        lines = [HEADER, *(row.cells() for row in self.rows)]
        speculative = [line for line, row in zip(lines[1:], self.rows, strict=True) if row.rule is not None]
        told = [
            name in ("method", "speed-up") or len({line[i] for line in speculative}) > 1
            for i, name in enumerate(HEADER)
        ]
        return [tuple(cell for cell, keep in zip(line, told, strict=True) if keep) for line in lines]


def assumptions(given: PlanInput) -> list[str]:
    """What a plan rests on, in words, with the settings that say otherwise."""
    target, draft = given.target, given.draft
    lines = [
        f"a target pass takes {target.pass_ms:g} ms + {target.token_ms:g} ms a token, "
        f"with {given.sequences} sequence{'s' if given.sequences > 1 else ''} at once on each target",
        f"a draft step takes {draft.step_ms:g} ms + {draft.row_ms:g} ms a node; {given.hop_ms:g} ms there and back",
    ]
    lines += [
        f"rule {rule}: {agreement.acceptance:.0%} of draft tokens accepted"
        for rule, agreement in given.agreements.items()
    ]
    priced = given.target_gpu_hour or given.draft_gpu_hour
    prices = f"{given.target_gpu_hour:g} a target GPU's hour, {given.draft_gpu_hour:g} a draft's"
    return [*lines, prices if priced else "no prices: the fastest way is the best one"]


def in_turn_speedup(given: PlanInput, agreement: Agreement, lookahead: int) -> float:
    """Draft `lookahead` tokens, then verify, each waiting for the other (Leviathan et al. 2023, with a hop)."""
    a, n = agreement.acceptance, given.sequences
    committed = expected_tokens(a, lookahead)
    target, draft = given.target, given.draft
    plain = target.pass_ms + target.token_ms * n
    verify = target.pass_ms + target.token_ms * n * (1 + lookahead)
    turn = verify + lookahead * (draft.step_ms + draft.row_ms * n) + given.hop_ms
    return committed * plain / turn if turn > 0 else 1.0


def expected_tokens(acceptance: float, lookahead: int) -> float:
    """(1 - a^(k+1)) / (1 - a): tokens committed by a pass that verifies k drafts (Leviathan et al. 2023, eq. 1)."""
    return sum(acceptance**i for i in range(lookahead + 1))


def break_even(target: TargetSpec, acceptance: float) -> float | None:
    """Sequences in a pass from which on even a first draft token is not worth its place; None: it always is.

    The n at which a · (A + B·n) tokens, what a second of the pass's time is worth for one token, fall to n·B.
    """
    if target.token_ms == 0.0 or acceptance >= 1.0:
        return None
    return acceptance * target.pass_ms / (target.token_ms * (1.0 - acceptance))


def expected_row(given: PlanInput, rule: Rule, method: Method, lookahead: int) -> PlanRow:
    """What to expect of one way to run, with a draft for every target; `rule` is one of given.agreements."""
    if method == "plain":
        return _plain(given)
    agreement = given.agreements[rule]
    if method == "in turn":
        return _in_turn(given, rule, agreement, lookahead)
    return _ahead(given, rule, agreement, method, lookahead, 1, 1)


def plan(given: PlanInput) -> Plan:
    """Work out the table: closed forms, and simulations of about a second each."""
    rows = [_plain(given)]
    for rule, agreement in given.agreements.items():
        rows += [expected_row(given, rule, "in turn", k) for k in given.lookaheads]
        rows += [expected_row(given, rule, "chain", k) for k in given.lookaheads]
        trees = [expected_row(given, rule, "tree", k) for k in given.lookaheads]
        rows += trees
        lookahead = max(trees, key=lambda row: row.speedup).lookahead
        rows += [
            _ahead(given, rule, agreement, "tree", lookahead, targets, drafts)
            for targets, drafts in RATIOS
            if targets != drafts and drafts <= targets * given.sequences <= 512  # no draft without a sequence
        ]
    limits = {rule: break_even(given.target, a.acceptance) for rule, a in given.agreements.items()}
    return Plan(tuple(rows), limits, _best(rows))


def _best(rows: Sequence[PlanRow]) -> PlanRow:
    priced = [row for row in rows if row.cost is not None]
    if priced:
        return min(priced, key=lambda row: row.cost or 0.0)
    return max((row for row in rows if row.drafts <= 2 * row.targets), key=lambda row: row.speedup)


def _cost(given: PlanInput, targets: int, drafts: int, tokens_per_second: float) -> float | None:
    hourly = given.hourly(targets, drafts)
    return 1e6 * hourly / (3600.0 * tokens_per_second) if hourly > 0.0 else None


def _plain(given: PlanInput) -> PlanRow:
    rate = plain_rate(SimulationInput(target=given.target, sequences=given.sequences))
    return PlanRow(None, "plain", 0, 1, 0, 1.0, rate, 1.0, 1.0, 0.0, _cost(given, 1, 0, rate))


def _in_turn(given: PlanInput, rule: Rule, agreement: Agreement, lookahead: int) -> PlanRow:
    speedup = in_turn_speedup(given, agreement, lookahead)
    rate = speedup * plain_rate(SimulationInput(target=given.target, sequences=given.sequences))
    committed = expected_tokens(agreement.acceptance, lookahead)
    turn = given.sequences * committed / rate  # seconds
    drafting = lookahead * (given.draft.step_ms + given.draft.row_ms * given.sequences) / 1e3
    return PlanRow(
        rule=rule,
        method="in turn",
        lookahead=lookahead,
        targets=1,
        drafts=1,
        speedup=speedup,
        tokens_per_second=rate,
        tokens_per_pass=committed,
        target_busy=1.0 - (drafting + given.hop_ms / 1e3) / turn,
        draft_busy=drafting / turn,
        cost=_cost(given, 1, 1, rate),
    )


def _ahead(
    given: PlanInput, rule: Rule, agreement: Agreement, method: Method, lookahead: int, targets: int, drafts: int
) -> PlanRow:
    tree = given.tree if method == "tree" else given.tree.model_copy(update={"branching": 1})
    result = _simulated(given, agreement, tree, lookahead, targets, drafts)
    rate = result.tokens_per_second
    return PlanRow(
        rule=rule,
        method=method,
        lookahead=lookahead,
        targets=targets,
        drafts=drafts,
        speedup=result.speedup,
        tokens_per_second=rate / targets,
        tokens_per_pass=result.tokens_per_pass,
        target_busy=result.target_busy,
        draft_busy=result.draft_busy,
        cost=_cost(given, targets, drafts, rate),
    )


def _simulated(
    given: PlanInput, agreement: Agreement, tree: TreeSettings, lookahead: int, targets: int, drafts: int
) -> SimulationResult:
    n = given.sequences
    pass_s = (given.target.pass_ms + given.target.token_ms * n * (1 + lookahead)) / 1e3
    passes = max(given.effort / (n * targets), 40.0)
    return simulate(
        SimulationInput(
            target=given.target,
            draft=given.draft.model_copy(update={"agreement": agreement}),
            hop_ms=given.hop_ms,
            sequences=n * targets,
            targets=targets,
            drafts=drafts,
            lookahead=LookaheadSettings(
                maximum=lookahead, tree=LookaheadSettings().tree if given.verifies_trees else 0
            ),
            tree=tree,
            seconds=max(passes * pass_s * 1.1, 1e-3),
        )
    )
