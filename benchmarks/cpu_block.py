"""What a target pass of a few tokens costs on a CPU, next to a pass of one token.

    python -m benchmarks cpu-block                    # the demo model
    python -m benchmarks cpu-block --model PATH       # any model that the transformers engine takes, in float32
    python -m benchmarks cpu-block --random           # random weights of the demo model's shape; fetches nothing

Four ways to run the same weights: transformers as it comes; this project's engine with the model's own layers; the
engine with packed and fused layers (what it uses); the same with weights in bfloat16 (for drafts). They take turns
within each round, so that a noisy neighbour hits them all alike; medians and quartiles over the rounds are printed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import SlotCache, SlotRow
from benchmarks.support import options
from benchmarks.support.demo_shape import demo_shaped_model
from benchmarks.support.provenance import heading

RANDOM = "random weights of the demo model's shape"
BLOCKS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
BATCHES = ((1, 1), (1, 5), (4, 1), (4, 5), (8, 1), (8, 5))
"""Sequences in the pass, and tokens of each."""
DEMO = "demo:smollm2-135m"
SLOTS = max(sequences for sequences, _ in BATCHES)
ROOM = max(BLOCKS)

Pass = Callable[[int, int], Tensor]
"""(sequences, tokens of each) -> logits [sequences * tokens, V] of the same tokens at the same places each time."""


@dataclass(frozen=True)
class Way:
    """One way to run the model."""

    name: str
    run: Pass


@dataclass(frozen=True)
class Spread:
    """Milliseconds: lower quartile, median, upper quartile."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(low * 1e3, middle * 1e3, high * 1e3)

    def __str__(self) -> str:
        return f"{self.middle:.1f} [{self.low:.1f}-{self.high:.1f}]"


def load(model: str | None) -> Any:
    """A transformers model in float32; None: random weights of the demo model's shape."""
    from transformers import AutoModelForCausalLM

    if model is not None:
        from cluster.models.references import fetch

        return AutoModelForCausalLM.from_pretrained(str(fetch(model)), dtype=torch.float32, local_files_only=True)
    return demo_shaped_model()


def as_it_comes(module: Any, context: int) -> Way:
    """transformers' own attention and cache, one sequence."""
    from transformers import DynamicCache

    module = module.eval().requires_grad_(False)
    tokens = _tokens(module, 1, context + ROOM)
    cache = DynamicCache(config=module.config)
    with torch.inference_mode():
        module(tokens[:, :context], past_key_values=cache, logits_to_keep=1)

    @torch.inference_mode()
    def run(sequences: int, length: int) -> Tensor:
        logits: Tensor = module(tokens[:, context : context + length], past_key_values=cache).logits[0]
        cache.crop(-length)
        return logits

    return Way("transformers", run)


def engine(module: Any, context: int, name: str, packed: torch.dtype | None) -> Way:
    """This project's engine, without what follows the logits."""
    model = CausalLM(module, name=name, packed=packed)
    tokens = _tokens(module, SLOTS, context + ROOM).tolist()
    cache: SlotCache = model.cache(slots=SLOTS, context=context + ROOM)
    for slot in range(SLOTS):
        model.run(cache, [SlotRow(slot, tokens[slot][:context], 0)], [context - 1])

    def run(sequences: int, length: int) -> Tensor:
        rows = [SlotRow(slot, tokens[slot][context : context + length], context) for slot in range(sequences)]
        return model.run(cache, rows, range(sequences * length))

    return Way(name, run)


def measure(ways: Sequence[Way], sequences: int, length: int, rounds: int) -> list[Spread]:
    """Passes of all ways in turn, after one of each that is not counted."""
    seconds: list[list[float]] = [[] for _ in ways]
    for counted in (False, *[True] * rounds):
        for way, spent in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            way.run(sequences, length)
            if counted:
                spent.append(time.perf_counter() - start)
    return [Spread.of(spent) for spent in seconds]


def report_blocks(ways: Sequence[Way], rounds: int) -> None:
    print(f"\nPass of one sequence, ms: median [quartiles] of {rounds}, and times a pass of one token of the same way")
    print(f"{'tokens':>6}" + "".join(f"{way.name:>32}" for way in ways))
    single: list[Spread] = []
    for length in BLOCKS:
        spreads = measure(ways, 1, length, rounds)
        single = single or spreads
        cells = [f"{s!s:>24} {s.middle / one.middle:>5.2f}x " for s, one in zip(spreads, single, strict=True)]
        print(f"{length:>6}" + "".join(cells), flush=True)


def report_batches(ways: Sequence[Way], rounds: int) -> None:
    print(f"\nPass of several sequences, ms: median [quartiles] of {rounds}")
    print(f"{'sequences':>9}{'tokens each':>12}" + "".join(f"{way.name:>32}" for way in ways))
    for sequences, length in BATCHES:
        spreads = measure(ways, sequences, length, rounds)
        print(f"{sequences:>9}{length:>12}" + "".join(f"{s!s:>32}" for s in spreads), flush=True)


def report_numbers(own: Way, packed: Way) -> None:
    """How far the logits move, and whether a token's logits depend on what else is in the pass."""
    length = ROOM
    moved = (own.run(1, length) - packed.run(1, length)).abs().max()
    print(f"\nlargest change of a logit by packing and fusing: {float(moved):.1e}")
    for way in (own, packed):
        whole = way.run(SLOTS, 5)
        alone = torch.cat([way.run(1, n)[n - 1 :] for n in (1, 2, 3, 4, 5)])
        apart = float((whole[:5] - alone).abs().max())
        print(f"{way.name}: a token decided alone and in a batch of {SLOTS} x 5 differ by {apart:.1e} at most")


def main(argv: Sequence[str]) -> int:
    parser = options.parser("cpu-block", __doc__)
    parser.add_argument("--model", default=DEMO, help="a path, a hub id or a demo reference")
    parser.add_argument("--random", action="store_true", help="random weights of the demo model's shape")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence before the block")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    reference: str | None = None if given.random else given.model
    print(heading(f"{reference or RANDOM}, float32"))
    plain, own, packed, half = (
        as_it_comes(load(reference), given.context),
        engine(load(reference), given.context, "engine, own layers", None),
        engine(load(reference), given.context, "engine, packed", torch.float32),
        engine(load(reference), given.context, "engine, bfloat16 weights", torch.bfloat16),
    )
    report_blocks([plain, own, packed, half], given.rounds)
    report_batches([own, packed, half], given.rounds)
    report_numbers(own, packed)
    return 0


def _tokens(module: Any, sequences: int, length: int) -> Tensor:
    """Any ids will do: [sequences, length]."""
    size = int(module.get_input_embeddings().num_embeddings)
    return torch.randint(0, size, (sequences, length), generator=torch.Generator().manual_seed(1))
