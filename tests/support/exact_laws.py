"""Closed-form laws of the acceptance rules on small vocabularies: every path summed, nothing sampled.

A *world* gives p and q at every prefix. `law` runs the shipped rule on every draft path and every outcome of its
acceptance tests, and adds up the probability of each sequence of k + 1 tokens; the tokens past the correction are
completed from p, as later passes would. `product` is the law of plain decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms import acceptance
from actors.messages import Support

Prefix = tuple[int, ...]
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    vocabulary: int
    k: int
    p: dict[Prefix, Vector]
    q: dict[Prefix, Vector]

    def rows(self, x: Prefix) -> Tensor:
        return torch.from_numpy(np.stack([self.p[x[:i]] for i in range(self.k + 1)]))

    def supports(self, x: Prefix) -> list[Support | None]:
        return [as_support(self.q[x[:i]]) for i in range(self.k)]


def as_support(q: Vector) -> Support:
    kept = np.flatnonzero(q)
    return Support(tuple(kept.tolist()), tuple(q[kept].tolist()))


SHAPES = ("free", "equal", "one-hot q", "one-hot p", "disjoint", "ties", "zeros", "near")


def random_pair(rng: np.random.Generator, vocabulary: int, shape: str) -> tuple[Vector, Vector]:
    p, q = rng.dirichlet(np.full(vocabulary, 0.7), size=2)
    if shape == "equal":
        q = p
    elif shape == "one-hot q":
        q = np.eye(vocabulary)[rng.integers(vocabulary)]
    elif shape == "one-hot p":
        p = np.eye(vocabulary)[rng.integers(vocabulary)]
    elif shape == "disjoint":
        side = rng.permutation(vocabulary) < vocabulary // 2
        p, q = np.where(side, p, 0), np.where(side, 0, q)
    elif shape == "ties":
        p, q = rng.integers(1, 3, size=(2, vocabulary)).astype(float)
    elif shape == "zeros":
        p, q = (np.where(np.arange(vocabulary) == rng.integers(vocabulary), 0, v) for v in (p, q))
    elif shape == "near":
        q = p * (1 + 1e-9 * rng.standard_normal(vocabulary))
    return p / p.sum(), q / q.sum()


def random_world(rng: np.random.Generator, vocabulary: int, k: int, shape: str | None = None) -> World:
    """p and q of the given shape; None draws a shape anew at every prefix."""
    p: dict[Prefix, Vector] = {}
    q: dict[Prefix, Vector] = {}
    for length in range(k + 1):
        for prefix in itertools.product(range(vocabulary), repeat=length):
            here = shape or SHAPES[rng.integers(len(SHAPES))]
            p[prefix], q[prefix] = random_pair(rng, vocabulary, here)
    return World(vocabulary, k, p, q)


def paths(world: World) -> Iterator[tuple[Prefix, float]]:
    """Every draft path that can be drawn, with its probability under q."""
    for x in itertools.product(range(world.vocabulary), repeat=world.k):
        weight = float(np.prod([world.q[x[:i]][x[i]] for i in range(world.k)]))
        if weight > 0:
            yield x, weight


Branch = tuple[acceptance.Decision, float]


def rejection_branches(world: World, x: Prefix) -> Iterator[Branch]:
    """Every outcome of token-wise verification of x, with its probability."""
    p, q = world.rows(x), world.supports(x)
    ratios = [min(1.0, acceptance.acceptance_ratio(p[i], q[i], x[i])) for i in range(world.k)]
    reached = 1.0
    for i, ratio in enumerate(ratios):
        if ratio < 1:
            yield acceptance.rejection(p, q, x, [0.0] * i + [ratio] + [0.0] * (world.k - i - 1)), reached * (1 - ratio)
        reached *= ratio
    if reached > 0:
        yield acceptance.rejection(p, q, x, [np.nextafter(ratio, 0) for ratio in ratios]), reached


def block_branches(world: World, x: Prefix) -> Iterator[Branch]:
    """Every outcome of block verification of x, with its probability."""
    p, q = world.rows(x), world.supports(x)
    _, h = acceptance.block_acceptance(p, q, x)
    left = 1.0
    for tau in range(world.k, -1, -1):
        here = left * (h[tau - 1] if tau else 1.0)
        if here > 0:
            eta = [h[i] if i == tau - 1 else np.nextafter(h[i], 2) if i >= tau else 0.5 for i in range(world.k)]
            yield acceptance.block(p, q, x, eta), here
        if tau:
            left *= 1 - h[tau - 1]


Branches = Callable[[World, Prefix], Iterator[Branch]]


def law(world: World, branches: Branches) -> tuple[Vector, float]:
    """The law of the first k + 1 tokens, [V] * (k + 1), and the expected number of accepted tokens."""
    total = np.zeros((world.vocabulary,) * (world.k + 1))
    plain = continuation(world)
    expected = 0.0
    for x, weight in paths(world):
        for decision, probability in branches(world, x):
            tau = decision.tau
            y = decision.y.numpy() / float(decision.y.sum())
            expected += weight * probability * tau
            for token in range(world.vocabulary):
                if y[token] > 0:
                    start = (*x[:tau], token)
                    total[start] += weight * probability * y[token] * plain[start]
    return total, expected


def continuation(world: World) -> dict[Prefix, Vector]:
    """Law, under p, of what completes each prefix to k + 1 tokens."""
    rest: dict[Prefix, Vector] = {}
    for length in range(world.k + 1, -1, -1):
        for prefix in itertools.product(range(world.vocabulary), repeat=length):
            if length == world.k + 1:
                rest[prefix] = np.ones(())
            else:
                rest[prefix] = np.stack([world.p[prefix][t] * rest[(*prefix, t)] for t in range(world.vocabulary)])
    return rest


def product(world: World) -> Vector:
    """The law of plain decoding."""
    return continuation(world)[()]
