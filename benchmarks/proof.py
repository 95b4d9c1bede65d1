"""Evidence for every claim of exactness, printed with its figure, its p-value and the command that repeats it.

    python -m benchmarks proof                    # about ten minutes on one core; the model's section is most of it
    python -m benchmarks proof --scale 20         # 20 times as much of everything sampled or enumerated
    python -m benchmarks proof --only laws path   # some sections

Enumerations sum every path and have no p-value. For statistics, p is the probability of a deviation as large by chance;
over the whole report, the least of n p-values is below a / n with probability a at most, so a line is flagged below
0.001 / n (n: the number of p-values printed). Exits with 1 if a line is flagged or an exact claim fails.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from actors.algorithms import acceptance
from actors.algorithms.drafting import RankedRow
from actors.algorithms.gumbel_max import GumbelMax
from actors.algorithms.noise import Stream, gumbel, row_key, words
from actors.settings import Rule, SamplingSettings
from benchmarks import proof_model
from benchmarks.support import options
from benchmarks.support.provenance import heading
from cluster.models.references import DEMO_TARGET

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import engine_path
from engine_path import EnginePath, answer_law, counts, fit
from exact_laws import (
    SHAPES,
    World,
    block_branches,
    law,
    product,
    random_world,
    rejection_branches,
)
from mixed_path import PHASES, HalvingLookahead, MixedPath, fit_by_row, laws
from toy_models import (
    Request,
    ToyModel,
    foe_draft,
    model_draft,
    noisy_draft,
    plain,
    speculated,
    tokens_of,
)

EXACT_RULES = {"rejection": rejection_branches, "block": block_branches}


@dataclass
class Report:
    """Prints lines as they come and remembers what to flag."""

    p_values: list[tuple[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def section(self, name: str, title: str) -> None:
        print(f"\n{title}\n  python -m benchmarks proof --only {name}", flush=True)

    def exact(self, claim: str, figure: str, holds: bool) -> None:
        print(f"  {'ok  ' if holds else 'FAIL'}  {claim}: {figure}", flush=True)
        if not holds:
            self.failures.append(claim)

    def chance(self, claim: str, figure: str, p: float) -> None:
        print(f"  p = {p:<8.2g}  {claim}: {figure}", flush=True)
        self.p_values.append((claim, p))

    def flagged(self) -> list[str]:
        bound = 0.001 / max(1, len(self.p_values))
        return [f"{claim} (p = {p:.2g} < {bound:.2g})" for claim, p in self.p_values if not p >= bound]


# -- sections ----------------------------------------------------------------------------------------------------------


def toy_table(report: Report, scale: float) -> None:
    report.section("toy", "The toy table: draft 50/50, target 80/20")
    p, q = np.array([0.8, 0.2]), np.array([0.5, 0.5])
    world = World(2, 1, dict.fromkeys([(), (0,), (1,)], p), dict.fromkeys([(), (0,), (1,)], q))
    rows, supports = world.rows((0,)), world.supports((0,))
    ratios = [min(1.0, acceptance.acceptance_ratio(rows[0], supports[0], token)) for token in (0, 1)]
    report.exact("acceptance of token 0 and 1", f"{ratios[0]:.0%} and {ratios[1]:.0%}", ratios == [1.0, 0.4])
    y = acceptance.rejection(rows, supports, (1,), [0.9]).y
    report.exact("correction falls on", f"token {int(y.argmax())} alone", y.tolist()[1] == 0 and float(y[0]) > 0)
    for name, branches in EXACT_RULES.items():
        first = law(world, branches)[0].sum(axis=1)
        report.exact(f"{name}: output, closed form", f"{first[0]:.15f}", abs(first[0] - 0.8) < 1e-14)
    draws = int(20_000 * scale)
    for rule in ("coupled", "rejection", "block"):
        target, draft = FixedModel(p), FixedModel(q)
        zeros = 0
        for seed in range(draws):
            request = Request(target, SamplingSettings(), seed, [0], rule=rule)
            drafts, given = model_draft(request, draft)([0], [], 1)
            zeros += request.verify([], drafts, given).tokens[0] == 0
        report.chance(f"{rule}: share of token 0 in {draws} draws", f"{zeros / draws:.4f}", binomial(zeros, draws, 0.8))


def closed_form(report: Report, scale: float) -> None:
    report.section("laws", "Closed-form laws: all draft paths and outcomes summed, against p")
    rng = np.random.default_rng(2025)
    sizes = ((2, 1, 60), (4, 1, 40), (8, 1, 10), (2, 3, 15), (3, 2, 15), (2, 4, 4), (3, 3, 2), (4, 2, 5))
    for name, branches in EXACT_RULES.items():
        worst, worlds = 0.0, 0
        for shape in (*SHAPES, None):
            for vocabulary, k, count in sizes:
                for _ in range(max(1, int(count * scale))):
                    world = random_world(rng, vocabulary, k, shape)
                    worst = max(worst, float(np.abs(law(world, branches)[0] - product(world)).max()))
                    worlds += 1
        report.exact(f"{name}: largest error over {worlds} pairs of models", f"{worst:.1e}", worst < 1e-12)
    gains = []
    for _ in range(int(400 * scale)):
        world = random_world(rng, *((3, 2), (2, 3), (2, 4))[rng.integers(3)])
        gains.append(law(world, block_branches)[1] - law(world, rejection_branches)[1])
    figure = f"least {min(gains):.1e}, mean {np.mean(gains):.4f} tokens, over {len(gains)} pairs"
    report.exact("block accepts no fewer than token-wise verification", figure, min(gains) > -1e-9)
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    prefixes = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    example = World(2, 2, dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q))
    got = [law(example, branches)[1] for branches in (rejection_branches, block_branches)]
    holds = np.allclose(got, [10 / 9, 11 / 9], atol=1e-12)
    report.exact("the example of Sun et al.: 10/9 and 11/9", f"{got[0] * 9:.6f}/9 and {got[1] * 9:.6f}/9", holds)


def noise(report: Report, scale: float) -> None:
    report.section("noise", "The noise")
    rows = max(4, int(40 * scale))
    for stream in (Stream.SHARED, Stream.DRAFT, Stream.CORRECTION):
        got = words([row_key(seed, 7, stream) for seed in range(rows)], torch.arange(100_000)).numpy().view(np.uint32)
        cells = np.bincount(got.ravel() >> 20, minlength=4096)
        low = np.bincount(got.ravel() & 0xFFF, minlength=4096)
        report.chance(
            f"{stream.name.lower()}: {got.size:.0e} words, high bits", "uniform", stats.chisquare(cells).pvalue
        )
        report.chance(f"{stream.name.lower()}: {got.size:.0e} words, low bits", "uniform", stats.chisquare(low).pvalue)
    side = max(50, int(100 * scale ** (1 / 3)))
    cube = np.stack([words([row_key(s, p) for p in range(side)], torch.arange(side)).numpy() for s in range(side)])
    cube = cube.view(np.uint32) >> 28
    for axis, name in enumerate(("seeds", "positions", "tokens")):
        report.chance(f"neighbouring {name}, {cube.size:.0e} pairs", "independent", pairs(cube, axis))
    streams = [
        words([row_key(1, p, s) for p in range(20)], torch.arange(20_000)).numpy().view(np.uint32) >> 28 for s in Stream
    ]
    for (i, first), (j, second) in itertools.combinations(enumerate(streams), 2):
        names = f"{list(Stream)[i].name.lower()} and {list(Stream)[j].name.lower()}"
        report.chance(f"streams {names}", "independent", contingency(first.ravel(), second.ravel()))
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025], dtype=torch.float64)
    draws = int(200_000 * scale)
    g = gumbel(torch.full((draws,), 9), torch.arange(draws), torch.arange(5), dtype=torch.float64)
    drawn = np.bincount((p.log() + g).argmax(-1).numpy(), minlength=5)
    report.chance(
        f"argmax(log p + g), {draws} positions", "follows p", stats.chisquare(drawn, p.numpy() * draws).pvalue
    )
    race, row = GumbelMax(49_152, torch.float64, torch.device("cpu")), torch.randn(49_152, dtype=torch.float64) * 3
    count, tokens = int(300 * scale), torch.arange(49_152)
    wrong = 0
    for position in range(count):
        full = row + gumbel(torch.tensor([1]), torch.tensor([position]), tokens, dtype=torch.float64)[0]
        wrong += race.winner(row, 1.0, row_key(1, position)) != int(full.argmax())
    report.exact(f"shortcut against all scores, vocabulary 49152, {count} rows", f"{wrong} differ", wrong == 0)


ALONE: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "temperature 1e-30": {"temperature": 1e-30},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 10": {"temperature": 10},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "logit_bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (4,)},
    "allowed_token_ids": {"allowed_token_ids": (1, 2, 3, 7)},
    "bad_words": {"bad_words": ((2,), (3, 4), (1, 1))},
    "logprobs": {"logprobs": 3},
}


def settings(report: Report, scale: float) -> None:
    report.section("settings", "On equals off: blocks against one token at a time (coupled and greedy, float64)")
    rng = random.Random(7)
    for name, fields in ALONE.items():
        differ, tokens = compared(fields, int(20 * scale), rng)
        report.exact(f"{name}: {tokens} tokens", f"{differ} answers differ", differ == 0)
    differ = tokens = 0
    combined = int(300 * scale)
    for _ in range(combined):
        fields = {}
        for chosen in rng.sample(list(ALONE.values()), rng.randrange(2, 6)):
            fields |= chosen
        one = compared(fields, 1, rng)
        differ, tokens = differ + one[0], tokens + one[1]
    report.exact(f"{combined} random combinations: {tokens} tokens", f"{differ} answers differ", differ == 0)


def compared(fields: dict[str, object], count: int, rng: random.Random) -> tuple[int, int]:
    """Answers that differ, and tokens compared; drafts of a Twin, a Foe and a noisy mixture, lookahead 0 to 5."""
    differ = tokens = 0
    for _ in range(count):
        model = ToyModel(12, seed=rng.randrange(1000), dtype=torch.float64)
        seed, prompt = rng.randrange(2**63), [rng.randrange(12) for _ in range(3)]
        request = Request(model, SamplingSettings.model_validate(fields), seed, prompt, eos=(0,))
        reference = tokens_of(plain(request, 16))
        for draft in (model_draft(request, model), foe_draft(request), noisy_draft(request, rng)):
            got = tokens_of(speculated(request, 16, draft, rng))[:16]
            differ += got != reference[: len(got)] or len(got) < len(reference)
            tokens += len(got)
    return differ, tokens


def path(report: Report, scale: float) -> None:
    report.section("path", "Answers through forest, lossy links, mailbox, lookahead controller, scheduler and rules")
    target, draft = ToyModel(3, seed=1, scale=1.2, memory=2), ToyModel(3, seed=2, scale=2.5, memory=2)
    length, each = 4, max(100, int(500 * scale))
    expected = answer_law(target, 1.0, length)
    rules: tuple[Rule, ...] = ("coupled", "rejection", "block")
    for rule in rules:
        total = np.zeros((3,) * length, dtype=np.int64)
        proposed = accepted = 0
        values = []
        for seed in range(20):
            # Dear tokens make the controller cut paths, cheap ones let it verify all it has.
            run = EnginePath(
                target, draft, rule, SamplingSettings(), length, seed=seed, slope=(0.0, 0.02, 0.03)[seed % 3]
            )
            found = counts(run.run(each), 3, length)
            values.append(fit(found, expected))
            total += found
            proposed, accepted = proposed + run.proposed, accepted + run.accepted
        draws = int(total.sum()) * length
        figure = f"{draws} tokens, {proposed} proposed, {accepted} accepted"
        whole = fit(total, expected)
        report.chance(f"{rule}, 20 seeds together", figure, whole)
        report.chance(f"{rule}, least of 20 seeds", f"p {min(values):.3g}", 1 - (1 - min(values)) ** 20)
    if scale >= 1:
        teeth(report, target, draft, expected, 9600)  # enough at any scale


MIXES = ((1, 0), (2, 7), (1, 15), (3, 3), (8, 8), (16, 0))
"""Sequences with drafts, and without, in a pass."""
SLOPES = (0.0, 0.01, 0.03, 0.08, 0.2)
"""What a token adds to a pass of a second: all drafts are worth verifying, or some, or with more sequences none."""


def control(report: Report, scale: float) -> None:
    report.section("control", "Every state of the controller: mixed neighbours, probes, off, trials of the payoff")
    print("  (1e6 tokens: --scale 8)", flush=True)
    each = int(25_000 * scale / (len(MIXES) * len(SLOPES)))
    rules: tuple[Rule, ...] = ("coupled", "rejection", "block", "typical")
    for rule in rules:
        found = sum(
            MixedPath(rule, *mix, slope, seed).run(each)
            for seed, (mix, slope) in enumerate(itertools.product(MIXES, SLOPES))
        )
        phases = ", ".join(f"{phase} {count}" for phase, count in zip(PHASES, found.sum(axis=(0, 2, 3)), strict=True))
        figure = f"{found.sum()} tokens, {found[1].sum()} where one was verified; {phases}"
        report.chance(f"{rule}, by phase and whether verified", figure, fit_by_row(found, laws(rule), rule))
    for rule in rules[1:3]:
        found = MixedPath(rule, 2, 7, 0.3, 1, controller=HalvingLookahead).run(6000)
        p = fit_by_row(found, laws(rule), rule)
        figure = f"p = {p:.1g} after {found.sum()} tokens"
        report.exact(f"{rule}: a controller that halves what it chose is noticed", figure, p < 1e-9)


def model(report: Report, scale: float) -> None:
    report.section("model", "On equals off on the demo model, in float64 (python -m benchmarks.proof_model: any model)")
    found = proof_model.run(DEMO_TARGET, "float64", prompts=int(1000 * scale))
    report.exact("speculation on against off", f"{found.tally}; {proof_model.figures(found)}", found.tally.same)
    for line in found.tally.different:
        print(f"        {line}")


def teeth(report: Report, target: ToyModel, draft: ToyModel, expected: np.ndarray, count: int) -> None:
    """The test must notice the known trap: confidences that tell which token was drawn, and a controller that cuts."""
    honest = engine_path.rank_children

    def telling(*arguments: object, **options: object) -> list[RankedRow]:
        ranked = honest(*arguments, **options)  # type: ignore[arg-type]
        found = []
        for row in ranked:
            assert row.support is not None
            q = dict(zip(row.support.tokens, row.support.probabilities, strict=True))
            found.append(RankedRow(row.tokens, tuple(q[token] for token in row.tokens), row.support))
        return found

    engine_path.rank_children = telling
    total = np.zeros(expected.shape, dtype=np.int64)
    try:
        for seed in range(32):  # short runs: a controller that has learned its confidences cuts less
            run = EnginePath(target, draft, "rejection", SamplingSettings(), 4, seed=seed, slope=0.03)
            total += counts(run.run(count // 32), 3, 4)
    finally:
        engine_path.rank_children = honest
    p = fit(total, expected)
    report.exact(f"a deliberately biased draft is noticed in {total.sum()} answers", f"p = {p:.1g}", p < 1e-5)


SECTIONS: dict[str, Callable[[Report, float], None]] = {
    "toy": toy_table,
    "laws": closed_form,
    "noise": noise,
    "settings": settings,
    "path": path,
    "control": control,
    "model": model,
}


# -- helpers -----------------------------------------------------------------------------------------------------------


class FixedModel(ToyModel):
    """The same distribution after every prefix."""

    def __init__(self, p: np.ndarray) -> None:
        super().__init__(len(p))
        self._row = torch.from_numpy(np.log(p))

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return self._row


def binomial(successes: int, draws: int, p: float) -> float:
    return float(stats.binomtest(successes, draws, p).pvalue)


def contingency(first: np.ndarray, second: np.ndarray) -> float:
    table = np.bincount(first.astype(np.int64) * 16 + second, minlength=256).reshape(16, 16)
    return float(stats.chi2_contingency(table).pvalue)


def pairs(cube: np.ndarray, axis: int) -> float:
    size = cube.shape[axis]
    return contingency(np.take(cube, range(size - 1), axis).ravel(), np.take(cube, range(1, size), axis).ravel())


def main(argv: Sequence[str]) -> int:
    parser = options.parser("proof", __doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(heading())
    report, started = Report(), time.perf_counter()
    for name in given.only:
        SECTIONS[name](report, given.scale)
    flagged = report.flagged()
    print(
        f"\n{len(report.p_values)} p-values, {len(flagged)} flagged; {len(report.failures)} exact claims failed; "
        f"{time.perf_counter() - started:.0f} s"
    )
    for line in (*report.failures, *flagged):
        print(f"  {line}")
    return 1 if flagged or report.failures else 0
