"""Random cases of (prefix, block, neighbours, chunk) on a deterministic target: how many change a bit; what it costs.

    python -m benchmarks same-bits                          # 10,000 cases, the demo model's first two layers
    python -m benchmarks same-bits --layers 30 --cases 500  # all of its layers
    python -m benchmarks same-bits --cases 0 --cost         # passes with target.deterministic against passes without

A case takes a text in one slot of a cache. Some last tokens of its prefix are computed in chunks of a random size, then
a block of random length, each beside random neighbours; what lies before them was computed in one go. Its logits, keys
and values are compared with those of decoding the same text one token to a pass, alone. Where the engine refuses the
promise, so does this command, by the same error.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.same_bits import require_same_bits
from actors.engines.transformers.slots import SlotCache, SlotRow
from actors.errors import ConfigError
from cluster.models import references, weights

SLOTS = 5
"""The reference, the one under test, and neighbours."""
WINDOW = 40
"""Tokens that are decoded one by one for reference; so many cases share them."""
CASES_PER_TEXT = 50


@dataclass(frozen=True, slots=True)
class Case:
    """chunked: tokens of the prefix that are computed again, `chunk` at a time, before the block of `length`."""

    start: int
    length: int
    chunked: int
    chunk: int


def draw(rng: random.Random, first: int, last: int) -> Case:
    """A case whose tokens lie in [first, last)."""
    length = rng.choice((1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 12, 16, 17))
    start = rng.randint(first, last - length)
    return Case(start, length, rng.randint(0, start - first), rng.randint(1, 32))


class Trial:
    """One text on one model, decoded token by token in slot 0."""

    def __init__(self, model: CausalLM, cache: SlotCache, rng: random.Random) -> None:
        self._model, self._cache, self._rng = model, cache, rng
        self._first = rng.randint(0, cache.context - WINDOW)
        self._last = self._first + WINDOW
        self._tokens = [rng.randrange(model.vocabulary_size) for _ in range(self._last)]
        if self._first:
            model.run(cache, [SlotRow(0, self._tokens[: self._first], 0)], [])
        self._logits = torch.cat(  # [WINDOW, V]
            [model.run(cache, [SlotRow(0, self._tokens[i : i + 1], i)], [0]) for i in range(self._first, self._last)]
        )

    def differs(self) -> bool:
        """Whether a random case changes a bit."""
        case = draw(self._rng, self._first, self._last)
        begin = case.start - case.chunked
        for layer in (*self._cache.keys, *self._cache.values):
            layer[1, :, :begin] = layer[0, :, :begin]
        for start in range(begin, case.start, case.chunk):
            self._run(start, min(case.chunk, case.start - start), keep=False)
        logits = self._run(case.start, case.length, keep=True)
        seen = slice(case.start - self._first, case.start - self._first + case.length)
        cells = slice(begin, case.start + case.length)
        layers = (*self._cache.keys, *self._cache.values)
        return not (
            torch.equal(logits, self._logits[seen])
            and all(torch.equal(layer[1, :, cells], layer[0, :, cells]) for layer in layers)
        )

    def _run(self, start: int, length: int, *, keep: bool) -> Tensor:
        rng, size = self._rng, self._model.vocabulary_size
        rows = [SlotRow(1, self._tokens[start : start + length], start)]
        for slot in rng.sample(range(2, SLOTS), rng.randint(0, SLOTS - 2)):
            count = rng.choice((1, 1, 2, 5, 9))
            place = rng.randint(0, self._cache.context - count)
            rows.insert(rng.randint(0, len(rows)), SlotRow(slot, [rng.randrange(size) for _ in range(count)], place))
        before = sum(len(row.tokens) for row in rows[: [row.slot for row in rows].index(1)])
        return self._model.run(self._cache, rows, range(before, before + length) if keep else [])


def count_differing(model: CausalLM, context: int, cases: int, seed: int) -> int:
    """Of so many random cases."""
    rng = random.Random(seed)
    cache = model.cache(slots=SLOTS, context=context)
    found = done = 0
    while done < cases:
        trial = Trial(model, cache, rng)
        for _ in range(min(CASES_PER_TEXT, cases - done)):
            found += trial.differs()
            done += 1
    return found


def report_cost(reference: str) -> None:
    """Passes of both kinds in turn; medians, and the median of the ratios."""
    fast, fixed = (weights.load_model(reference, device="cpu", deterministic=promised) for promised in (False, True))
    rng = random.Random(0)
    caches = [model.cache(slots=16, context=512) for model in (fast, fixed)]
    text = [rng.randrange(3, fast.vocabulary_size) for _ in range(512)]
    for model, cache in zip((fast, fixed), caches, strict=True):
        for slot in range(16):
            model.run(cache, [SlotRow(slot, text[:320], 0)], [])
    print(f"{'sequences':>9} {'tokens each':>11} {'fast, ms':>9} {'deterministic, ms':>18} {'ratio':>6}")
    for sequences, length in ((1, 1), (1, 5), (1, 8), (1, 16), (4, 5), (8, 1), (16, 1), (1, 256)):
        spent: list[list[float]] = [[], []]
        for _ in range(4 if length > 100 else 12):
            # A block may begin at any residue, and each sequence has its own.
            starts = [rng.randint(240, 311) if length < 100 else 0 for _ in range(sequences)]
            rows = [SlotRow(slot, text[start : start + length], start) for slot, start in enumerate(starts)]
            keep = range(sequences * length) if length < 100 else [length - 1]
            for model, cache, seconds in zip((fast, fixed), caches, spent, strict=True):
                begin = time.perf_counter()
                model.run(cache, rows, keep)
                seconds.append(time.perf_counter() - begin)
        middle = [statistics.median(seconds[1:]) * 1e3 for seconds in spent]
        mean = [statistics.fmean(seconds[1:]) for seconds in spent]
        print(f"{sequences:>9} {length:>11} {middle[0]:>9.1f} {middle[1]:>18.1f} {mean[1] / mean[0]:>6.2f}", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=references.DEMO_TARGET)
    parser.add_argument("--layers", type=int, default=2, help="keep the first so many")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--cost", action="store_true", help="also what the promise costs, with all layers")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"{platform.processor() or platform.machine()}, {capability}, {options.threads} thread(s), {torch.__version__}"
    )
    failed = 0
    if options.cases:
        begin = time.perf_counter()
        try:
            model = weights.load_model(
                options.model, dtype=options.dtype, device="cpu", layers=options.layers, deterministic=True
            )
            require_same_bits(model, options.context)
        except ConfigError as refusal:
            print(f"refused: {refusal}")
            return 0
        print(f"check at start-up: held, {time.perf_counter() - begin:.1f} s with loading")
        failed = count_differing(model, options.context, options.cases, options.seed)
        print(
            f"{options.model}, {options.layers} layers, {options.dtype}, context {options.context}, "
            f"seed {options.seed}: "
            f"{failed} of {options.cases} random cases differ ({time.perf_counter() - begin:.0f} s)"
        )
    if options.cost:
        report_cost(options.model)
    return min(failed, 1)
