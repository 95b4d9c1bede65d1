"""Whether a token's logits are the same to the last bit whatever else is in the pass: checked on the loaded model.

That they are is a matter of construction (fixed_shapes.py), not of this check, which would notice a library or a model
that breaks the construction's assumptions. Where the bits agree, no near-tie can part an answer from the one without
speculation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.fixed_shapes import BLOCK, CELLS
from actors.engines.transformers.slots import SlotCache, SlotRow
from actors.errors import ConfigError

_TOGETHER = 4
"""Blocks that are computed beside each other."""
_AT_RANDOM = 8
"""Blocks, on top of one for each residue, of any length up to three tiles."""


@dataclass(frozen=True, slots=True)
class Case:
    """A block of tokens past a prefix of `start`."""

    start: int
    tokens: tuple[int, ...]


def require_same_bits(model: CausalLM, context: int, seed: int = 0) -> None:
    """Raises ConfigError when blocks, neighbours or the cuts of a block change a logit of `model`.

    Blocks begin at every residue of CELLS, and so of BLOCK, spread over the whole context, and some more at random
    places. The prefixes are random numbers in the cache, so the time depends on the context only through attention:
    about a hundred passes of a tile. context: tokens of the longest sequence.
    """
    found = largest_difference(model, context, random.Random(seed))
    if found > 0:
        raise ConfigError(
            f"target.deterministic cannot be promised here: logits of {model.name} in {model.dtype} on {model.device} "
            f"change by up to {found:.1e} with the batch they are computed in; leave it off, and near-ties are counted",
            "target.deterministic",
        )


def largest_difference(model: CausalLM, context: int, rng: random.Random) -> float:
    """Between blocks computed alone and those cut in two beside others: of any logit, key or value."""
    cache = _filled(model, context)
    cases = _cases(context, model.vocabulary_size, rng)
    # From the end of the context to its beginning: a block overwrites what follows it, and never a later case's prefix.
    cases.sort(key=lambda case: -case.start)
    largest = 0.0
    while cases:
        together, cases = cases[:_TOGETHER], cases[_TOGETHER:]
        whole = [_pass(model, cache, [(slot, case)])[slot] for slot, case in enumerate(together)]
        parts = [_pass(model, cache, step) for step in _steps(together, rng)]
        for slot, case in enumerate(together):
            other = slot + _TOGETHER
            again = torch.cat([part[other] for part in parts if other in part])
            largest = max(largest, _difference(again, whole[slot]))
            cells = slice(case.start, case.start + len(case.tokens))
            for layer in (*cache.keys, *cache.values):
                largest = max(largest, _difference(layer[slot, :, cells], layer[other, :, cells]))
    return largest


def _cases(context: int, vocabulary: int, rng: random.Random) -> list[Case]:
    """One for each residue that the context has, of up to half a tile, and some of any length."""
    stretches = range(0, max(context - CELLS, 0) + 1, CELLS)
    starts = [rng.choice(stretches) + residue for residue in range(min(CELLS, context))]
    lengths = [rng.randint(1, BLOCK // 2) for _ in starts]
    starts += [rng.randrange(context) for _ in range(_AT_RANDOM)]
    lengths += [rng.randint(1, 3 * BLOCK) for _ in range(_AT_RANDOM)]
    return [
        Case(start, tuple(rng.randrange(vocabulary) for _ in range(min(length, context - start))))
        for start, length in zip(starts, lengths, strict=True)
    ]


def _filled(model: CausalLM, context: int) -> SlotCache:
    """A cache whose slots all hold the same random prefix, as long as the context."""
    cache = model.cache(slots=2 * _TOGETHER, context=context)
    generator = torch.Generator(model.device).manual_seed(0)
    for layer in (*cache.keys, *cache.values):
        layer[0].normal_(generator=generator)
        layer[1:] = layer[0]
    for slot in range(cache.slots):
        cache.claim(slot, cache.context, cache.context)
    return cache


def _steps(together: Sequence[Case], rng: random.Random) -> list[list[tuple[int, Case]]]:
    """The same blocks in other slots, beside each other, each cut in two (or not at all): two passes."""
    steps: list[list[tuple[int, Case]]] = [[], []]
    for slot in rng.sample(range(len(together)), len(together)):
        case = together[slot]
        cut = rng.randint(1, len(case.tokens))
        pieces = Case(case.start, case.tokens[:cut]), Case(case.start + cut, case.tokens[cut:])
        for step, piece in zip(steps, pieces, strict=True):
            if piece.tokens:
                step.insert(0, (slot + _TOGETHER, piece))
    return [step for step in steps if step]


def _pass(model: CausalLM, cache: SlotCache, blocks: Sequence[tuple[int, Case]]) -> dict[int, Tensor]:
    """Logits [tokens, V] of each slot's block, from one pass."""
    rows = [SlotRow(slot, case.tokens, case.start) for slot, case in blocks]
    lengths = [len(row.tokens) for row in rows]
    logits = model.run(cache, rows, range(sum(lengths)))
    return dict(zip((row.slot for row in rows), torch.split(logits, lengths), strict=True))


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest, or infinity where one of the two is no number."""
    if torch.equal(found, expected):
        return 0.0
    return float((found - expected).abs().max().nan_to_num(nan=torch.inf, posinf=torch.inf))
