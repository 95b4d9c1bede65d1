"""What the acceptance step costs, as a share of the target pass that it rides on.

    python -m benchmarks algorithms             # the main sizes
    python -m benchmarks algorithms --full      # vocabulary 49k and 152k, lookahead 1-16, batch 1-64, every rule
    python -m benchmarks algorithms --pass-ms 64

`alone` decides row by row with the scalar code that is the tests' reference (verification.verify_alone); `together` is
what passes do: the rows of all blocks are read by one program (row_program.py).

The pass is measured too, unless --pass-ms gives it: a decoder of the demo model's shape (30 layers of width 576, random
weights, the vocabulary in question) over the same number of tokens, each with a few tokens of cache. The acceptance
step is measured at its dearest: drafts come from the target's own scores, so that the deterministic
rules accept all and look at every row (the last column; rejection and block draw from a truncated q and accept less).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from actors.algorithms.drafting import DraftRow, rank_children
from actors.algorithms.noise import NoiseSource, row_key
from actors.algorithms.types import Block
from actors.algorithms.verification import verify_alone, verify_blocks
from actors.messages import VerificationResult
from actors.settings import Rule, SamplingSettings
from benchmarks.support import options
from benchmarks.support.demo_shape import demo_shaped_model
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.provenance import heading

VOCABULARIES = (49_152, 151_936)
LARGEST_LOGITS = 800 * 2**20
"""Bytes; combinations that need more are left out, and said to be."""

CASES: dict[str, tuple[Rule, SamplingSettings]] = {
    "greedy": ("coupled", SamplingSettings(temperature=0)),
    "coupled": ("coupled", SamplingSettings()),
    "coupled, top_k 50 top_p .9": ("coupled", SamplingSettings(top_k=50, top_p=0.9)),
    "coupled, top_p .9": ("coupled", SamplingSettings(top_p=0.9)),
    "coupled, top_p .9 at T 1.5": ("coupled", SamplingSettings(top_p=0.9, temperature=1.5)),
    "coupled, min_p .05": ("coupled", SamplingSettings(min_p=0.05)),
    "coupled, top_p .9, penalties": (
        "coupled",
        SamplingSettings(top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.1),
    ),
    "coupled, penalties": ("coupled", SamplingSettings(frequency_penalty=0.5, repetition_penalty=1.1)),
    "coupled, logprobs 5": ("coupled", SamplingSettings(logprobs=5)),
    "rejection": ("rejection", SamplingSettings()),
    "rejection, top_p .9": ("rejection", SamplingSettings(top_p=0.9)),
    "block": ("block", SamplingSettings()),
    "typical": ("typical", SamplingSettings()),
}


@dataclass(frozen=True)
class Size:
    vocabulary: int
    batch: int
    lookahead: int

    @property
    def rows(self) -> int:
        return self.batch * (self.lookahead + 1)


def seconds(run: Callable[[], object], least: float = 0.3) -> float:
    """Best of several runs: what the code needs when nothing else is running."""
    run()
    best, until = float("inf"), time.perf_counter() + least
    repetitions = 0
    while repetitions < 3 or (time.perf_counter() < until and repetitions < 200):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        repetitions += 1
    return best


def logits_of(size: Size) -> Tensor:
    """Scores about as peaked as a language model's: about 3 nats of entropy in a row."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size.rows, size.vocabulary, generator=generator).mul_(5)


def twin_blocks(logits: Tensor, size: Size, rule: Rule, sampling: SamplingSettings) -> list[Block]:
    """Blocks whose drafts come from the target's own logits, so that (nearly) all are accepted."""
    blocks = []
    prompt = tuple(range(500))
    for n in range(size.batch):
        start = n * (size.lookahead + 1)
        asked = [DraftRow(sampling, n, len(prompt) + i, prefix=i) for i in range(size.lookahead)]
        rows = logits[start : start + size.lookahead]
        ranked = rank_children(rows, asked, branching=1, support=32, rule=rule)
        supports = [r.support for r in ranked if r.support is not None]
        blocks.append(
            Block(sampling, n, len(prompt), prompt, (), [r.tokens[0] for r in ranked], supports, rule=rule, eos=(2,))
        )
    return blocks


class PassClock:
    """Seconds of one target pass over so many tokens: measured at a few sizes, linear in between and beyond."""

    def __init__(self, vocabulary: int, fixed: float | None, sizes: Sequence[int]) -> None:
        self._fixed = fixed
        self._points: list[tuple[int, float]] = []
        if fixed is None:
            model = demo_shaped_model(vocabulary)
            self._points = [(tokens, measured_pass(model, tokens)) for tokens in sizes]

    def curve(self) -> str:
        """Tokens and milliseconds of the passes that were measured."""
        return ", ".join(f"{tokens}: {seconds * 1e3:.0f}" for tokens, seconds in self._points) or "given"

    def seconds(self, tokens: int) -> float:
        if self._fixed is not None:
            return self._fixed
        for low, high in zip(self._points, self._points[1:], strict=False):
            if tokens <= high[0] or high is self._points[-1]:
                slope = (high[1] - low[1]) / (high[0] - low[0])
                return low[1] + slope * (tokens - low[0])
        return self._points[0][1]


@torch.no_grad()
def measured_pass(model: torch.nn.Module, tokens: int) -> float:
    """Up to 17 tokens of a sequence at a time, as a verification pass has them."""
    each = min(tokens, 17)
    ids = torch.zeros(-(-tokens // each), each, dtype=torch.int64)
    return seconds(lambda: model(ids, use_cache=False), least=1.0)


def sizes(full: bool) -> list[Size]:
    if full:
        return [Size(*each) for each in product(VOCABULARIES, (1, 4, 16, 64), (1, 2, 4, 8, 16))]
    small = [Size(49_152, 1, 4), Size(49_152, 8, 4), Size(49_152, 64, 4)]
    return [*small, Size(151_936, 1, 4), Size(151_936, 8, 4)]


def noise_row_seconds(vocabulary: int) -> float:
    source = NoiseSource(torch.arange(vocabulary))
    return seconds(lambda: source.negated([row_key(1, 2)]))


def main(argv: Sequence[str]) -> int:
    parser = options.parser("algorithms", __doc__)
    parser.add_argument("--pass-ms", type=float, help="take this for the length of every pass instead of measuring it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--limit", type=float, default=5.0, help="per cent of the pass; what is above is marked")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    print(heading())
    shares: list[float] = []
    for vocabulary in VOCABULARIES:
        chosen = [size for size in sizes(given.full) if size.vocabulary == vocabulary]
        fixed = None if given.pass_ms is None else given.pass_ms / 1000
        clock = PassClock(
            vocabulary, fixed, sorted({1, 5, 17, 68, 136, *(size.rows for size in chosen if not given.full)})
        )
        print(f"\npass of a demo-sized model, tokens: ms: {clock.curve()}")
        print(f"vocabulary {vocabulary}: one row of noise {noise_row_seconds(vocabulary) * 1e3:.2f} ms")
        columns = f"{'pass ms':>10}{'alone ms':>10}{'together':>10}{'share':>8}{'accepted':>10}"
        print(f"{'case':28}{'batch':>6}{'k':>4}{columns}")
        for size in chosen:
            shares += report(size, clock, given.limit)
    print()
    return print_goals([Goal("acceptance step, largest share of a target pass, %", max(shares), given.limit, False)])


def all_alone(logits: Tensor, blocks: Sequence[Block]) -> list[VerificationResult]:
    parts = torch.split(logits, [len(block.drafts) + 1 for block in blocks])
    return [verify_alone(part, block) for part, block in zip(parts, blocks, strict=True)]


def report(size: Size, clock: PassClock, limit: float) -> list[float]:
    """Print a line per case. Returns their shares of the pass, per cent; none if the size is left out."""
    if size.rows * size.vocabulary * 4 > LARGEST_LOGITS:
        print(f"{'(left out: too large)':28}{size.batch:>6}{size.lookahead:>4}")
        return []
    logits = logits_of(size)
    whole = clock.seconds(size.rows)
    shares = []
    for name, (rule, sampling) in CASES.items():
        blocks = twin_blocks(logits, size, rule, sampling)
        spent = seconds(lambda blocks=blocks: verify_blocks(logits, blocks))  # type: ignore[misc]
        share = 100 * spent / whole
        shares.append(share)
        before = seconds(lambda blocks=blocks: all_alone(logits, blocks))  # type: ignore[misc]
        accepted = sum(outcome.accepted for outcome in verify_blocks(logits, blocks)) / (size.batch * size.lookahead)
        mark = "  above the limit" if share > limit else ""
        print(
            f"{name:28}{size.batch:>6}{size.lookahead:>4}{whole * 1e3:>10.1f}{before * 1e3:>10.2f}"
            f"{spent * 1e3:>10.2f}{share:>7.1f}%{accepted:>10.0%}{mark}"
        )
    return shares
