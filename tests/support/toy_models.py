"""A tiny deterministic language model, and plain and speculative decoding loops around the algorithms."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from actors.algorithms.drafting import DraftRow, rank_children
from actors.algorithms.types import Block
from actors.algorithms.verification import Grammar, verify_blocks
from actors.messages import Support, VerificationResult, prefix_key
from actors.settings import Rule, SamplingSettings


@dataclass
class ToyModel:
    """Logits are normal numbers drawn from a generator that the prefix seeds: any change of prefix changes them all.

    memory: how many tokens of the prefix count (all by default), so that laws over few contexts can be computed.
    """

    vocabulary: int
    seed: int = 0
    scale: float = 2.0
    dtype: torch.dtype = torch.float32
    memory: int | None = None
    _cache: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def logits(self, prefix: Sequence[int]) -> Tensor:
        seen = tuple(prefix if self.memory is None else prefix[-self.memory :] if self.memory else ())
        if seen not in self._cache:
            generator = torch.Generator().manual_seed((prefix_key(seen) ^ self.seed * 0x9E3779B9) & (1 << 63) - 1)
            drawn = torch.randn(self.vocabulary, generator=generator, dtype=torch.float64) * self.scale
            self._cache[seen] = drawn.to(self.dtype)
        return self._cache[seen]


Draft = Callable[[list[int], list[int], int], tuple[list[int], list[Support]]]
"""(prompt, output, k) -> k draft tokens and their supports."""


@dataclass
class Request:
    model: ToyModel
    sampling: SamplingSettings
    seed: int
    prompt: list[int]
    rule: Rule = "coupled"
    eos: tuple[int, ...] = ()

    def verify(
        self,
        output: list[int],
        drafts: Sequence[int] = (),
        supports: Sequence[Support] = (),
        grammar: Grammar | None = None,
    ) -> VerificationResult:
        prefix = [*self.prompt, *output]
        rows = torch.stack([self.model.logits([*prefix, *drafts[:i]]) for i in range(len(drafts) + 1)])
        block = Block(
            self.sampling, self.seed, len(prefix), self.prompt, output, drafts, supports, rule=self.rule, eos=self.eos
        )
        return verify_blocks(rows, [block], None if grammar is None else [grammar])[0]


def plain(request: Request, count: int) -> list[VerificationResult]:
    """One outcome per token, up to `count` or the first error."""
    output: list[int] = []
    outcomes: list[VerificationResult] = []
    while len(output) < count:
        outcomes.append(request.verify(output))
        if outcomes[-1].error is not None:
            break
        output.extend(outcomes[-1].tokens)
    return outcomes


def speculated(
    request: Request, count: int, draft: Draft, rng: random.Random, most: int = 5
) -> list[VerificationResult]:
    """Outcomes of passes with random lookahead until `count` tokens are there, or an error."""
    output: list[int] = []
    outcomes: list[VerificationResult] = []
    while len(output) < count:
        drafts, supports = draft(request.prompt, output, rng.randrange(most + 1))
        outcomes.append(request.verify(output, drafts, supports))
        output.extend(outcomes[-1].tokens)
        if outcomes[-1].error is not None:
            break
    return outcomes


def tokens_of(outcomes: Sequence[VerificationResult]) -> list[int]:
    return [token for outcome in outcomes for token in outcome.tokens]


def model_draft(request: Request, model: ToyModel, *, with_history: bool = True, support: int = 32) -> Draft:
    """The first-child chain of `model` under the request's settings. The same model makes a Twin."""

    def draft(prompt: list[int], output: list[int], k: int) -> tuple[list[int], list[Support]]:
        path: list[int] = []
        supports: list[Support] = []
        for _ in range(k):
            prefix = [*prompt, *output, *path]
            row = DraftRow(
                request.sampling,
                request.seed,
                len(prefix),
                prefix_key(prefix),
                prompt if with_history else (),
                [*output, *path] if with_history else None,
                len(output) + len(path),
                request.eos,
            )
            ranked = rank_children(model.logits(prefix)[None], [row], branching=1, support=support, rule=request.rule)[
                0
            ]
            if not ranked.tokens:
                break
            path.append(ranked.tokens[0])
            if ranked.support is not None:
                supports.append(ranked.support)
        return path, supports

    return draft


def foe_draft(request: Request) -> Draft:
    """Always a token that the target does not take next."""

    def draft(prompt: list[int], output: list[int], k: int) -> tuple[list[int], list[Support]]:
        taken = request.verify(output).tokens
        wrong = (taken[0] + 1) % request.model.vocabulary if taken else 0
        return [wrong] * k, []

    return draft


def noisy_draft(request: Request, rng: random.Random, right: float = 0.7) -> Draft:
    """Each token right with some probability, else anything, also ids that do not exist."""

    def draft(prompt: list[int], output: list[int], k: int) -> tuple[list[int], list[Support]]:
        path: list[int] = []
        for _ in range(k):
            taken = request.verify([*output, *path]).tokens
            path.append(taken[0] if taken and rng.random() < right else rng.randrange(request.model.vocabulary))
        if path and rng.random() < 0.1:
            path[-1] = rng.choice([-1, request.model.vocabulary, 10**9])
        return path, []

    return draft
