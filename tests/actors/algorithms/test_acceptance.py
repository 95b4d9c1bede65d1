"""The exact rules against p by summing every path; nothing here is sampled, so nothing here fails by chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from exact_laws import SHAPES, Prefix, World, block_branches, law, paths, product, random_world, rejection_branches

from actors.algorithms import acceptance
from actors.messages import Support

RULES = {"rejection": rejection_branches, "block": block_branches}
HALF = Support((0, 1), (0.5, 0.5))


def test_toy_table_of_the_literature() -> None:
    """Draft 50/50, target 80/20: token 0 always stands, token 1 two times in five, and only 0 corrects it."""
    p = torch.tensor([[0.8, 0.2], [0.8, 0.2]], dtype=torch.float64)
    assert acceptance.acceptance_ratio(p[0], HALF, 0) == pytest.approx(1.6)
    assert acceptance.acceptance_ratio(p[0], HALF, 1) == pytest.approx(0.4)
    for rule in (acceptance.rejection, acceptance.block):
        assert rule(p, [HALF], [0], [0.999999]).tau == 1
        assert rule(p, [HALF], [1], [0.399999]).tau == 1
        rejected = rule(p, [HALF], [1], [0.400001])
        assert rejected.tau == 0
        assert rejected.y.tolist() == pytest.approx([0.3, 0.0])


@pytest.mark.parametrize("rule", RULES)
def test_toy_table_output_is_the_target(rule: str) -> None:
    p, q = np.array([0.8, 0.2]), np.array([0.5, 0.5])
    world = World(2, 1, {(): p, (0,): p, (1,): p}, {(): q, (0,): q, (1,): q})
    total, accepted = law(world, RULES[rule])
    assert total.sum(axis=1) == pytest.approx([0.8, 0.2], abs=1e-15)
    assert accepted == pytest.approx(0.5 + 0.5 * 0.4)


def test_block_paper_example() -> None:
    """Sun et al. 2025, section 2: p = (1/3, 2/3), q = (2/3, 1/3), k = 2: 10/9 accepted token-wise, 11/9 jointly."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    prefixes = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    world = World(2, 2, dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q))
    assert law(world, rejection_branches)[1] == pytest.approx(10 / 9)
    assert law(world, block_branches)[1] == pytest.approx(11 / 9)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [*SHAPES, None])
def test_output_law_is_the_targets(rule: str, shape: str | None) -> None:
    rng = np.random.default_rng(SHAPES.index(shape) if shape else 99)
    for vocabulary, k, worlds in ((2, 1, 60), (4, 1, 40), (2, 3, 10), (3, 2, 10), (2, 4, 2)):
        for _ in range(worlds):
            world = random_world(rng, vocabulary, k, shape)
            total, _ = law(world, RULES[rule])
            assert np.abs(total - product(world)).max() < 1e-12


def test_block_never_expects_fewer_tokens() -> None:
    rng = np.random.default_rng(5)
    gains = []
    for _ in range(100):
        world = random_world(rng, 3, 2)
        gains.append(law(world, block_branches)[1] - law(world, rejection_branches)[1])
    assert min(gains) > -1e-9
    assert max(gains) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_a_rejected_token_is_not_drawn_again(rule: str) -> None:
    """So a draft subtree whose tokens took part in a decision is never offered again under the same prefix."""
    rng = np.random.default_rng(6)
    for _ in range(60):
        world = random_world(rng, 3, 2)
        for x, _ in paths(world):
            for decision, probability in RULES[rule](world, x):
                if decision.tau < world.k and probability > 1e-8:
                    assert decision.y[x[decision.tau]] <= 1e-9


def test_expected_length_of_independent_acceptance() -> None:
    """Leviathan et al. 2023, equation 1: with acceptance a at every position, (1 - a^(k+1)) / (1 - a) tokens a pass."""
    p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])
    a = np.minimum(p, q).sum()
    k = 3
    prefixes = [
        tuple(map(int, np.binary_repr(i, length))) if length else () for length in range(4) for i in range(2**length)
    ]
    world = World(2, k, dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q))
    assert law(world, rejection_branches)[1] + 1 == pytest.approx((1 - a ** (k + 1)) / (1 - a))


@pytest.mark.parametrize("rule", [acceptance.rejection, acceptance.block])
def test_deterministic_draft_is_accepted_with_p(rule: type[acceptance.rejection]) -> None:
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    assert rule(p, [None], [0], [0.2499]).tau == 1
    rejected = rule(p, [None], [0], [0.2501])
    assert (rejected.tau, rejected.y.tolist()) == (0, [0.0, 0.75])


@pytest.mark.parametrize("rule", [acceptance.rejection, acceptance.block])
def test_no_draft_is_plain_sampling(rule: type[acceptance.rejection]) -> None:
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    decision = rule(p, [], [], [])
    assert (decision.tau, decision.y.tolist()) == (0, [0.25, 0.75])


def test_coupled_stops_at_the_first_disagreement() -> None:
    assert acceptance.coupled([4, 5, 6, 7], [4, 5, 9]) == 2
    assert acceptance.coupled([4, 5, 6, 7], [4, 5, 6]) == 3
    assert acceptance.coupled([3], [4, 5, 6]) == 0


def test_typical_threshold() -> None:
    """Uniform over 4: delta exp(-H) = 0.3 / 4 = 0.075, so 0.25 stands; 0.05 beside 0.95 is below min(0.09, 0.246)."""
    p = torch.tensor([[0.25] * 4, [0.05, 0.95, 0, 0], [1.0, 0, 0, 0]], dtype=torch.float64)
    assert acceptance.typical(p, [3, 1, 0], [0, 0]) == 1
    assert acceptance.typical(p, [3, 0, 0], [0, 0]) == 2  # the choice itself always stands
    assert acceptance.typical(p, [3, 1, 0], [0, 1]) == 2


@pytest.mark.parametrize(
    ("support", "why"),
    [
        (None, "missing"),
        (Support((1, 2), (0.5, 0.5)), "token not in it"),
        (Support((0, 1), (0.5,)), "lengths differ"),
        (Support((0, 0), (0.5, 0.5)), "an id twice"),
        (Support((0, 9), (0.5, 0.5)), "an id outside the vocabulary"),
        (Support((0, -1), (0.5, 0.5)), "a negative id"),
        (Support((0, 1), (0.5, 0.4)), "not summing to one"),
        (Support((0, 1), (1.5, -0.5)), "a negative probability"),
        (Support((0, 1), (float("nan"), 0.5)), "not a number"),
        (Support((0, 1), (0.0, 1.0)), "token of probability zero"),
    ],
)
def test_impossible_supports_are_taken_for_deterministic(support: Support | None, why: str) -> None:
    assert acceptance.usable_support(support, 0, 4) is None, why


BREAKS = {
    "lost": lambda q, token: None,
    "another token's": lambda q, token: Support(tuple(t for t in q.tokens if t != token), (1.0,) * (len(q.tokens) - 1)),
    "shorter": lambda q, token: Support(q.tokens, q.probabilities[:-1]),
    "not a number": lambda q, token: Support(q.tokens, (float("nan"),) * len(q.tokens)),
    "twice as much": lambda q, token: Support(q.tokens, tuple(2 * p for p in q.probabilities)),
}


@dataclass(frozen=True)
class BrokenWorld(World):
    """Tokens are drawn from q, and at some prefixes what is said of q makes no sense."""

    how: Callable[[Support, int], Support | None]

    def supports(self, x: Prefix) -> list[Support | None]:
        honest = super().supports(x)
        said = [self.how(q, x[i]) if q is not None and (sum(x[:i]) + i) % 2 == 0 else q for i, q in enumerate(honest)]
        return [acceptance.usable_support(q, token, self.vocabulary) for q, token in zip(said, x, strict=True)]


@dataclass(frozen=True)
class CutWorld(World):
    """Tokens are drawn from q, and what is said of q is cut to its best two ids after the draw."""

    def supports(self, x: Prefix) -> list[Support | None]:
        found = []
        for i, token in enumerate(x):
            q = self.q[x[:i]]
            best = np.argsort(q)[-2:]
            cut = Support(tuple(best.tolist()), tuple((q[best] / q[best].sum()).tolist()))
            found.append(acceptance.usable_support(cut, token, self.vocabulary))
        return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", [*BREAKS, "cut after the draw"])
def test_a_broken_support_costs_acceptance_alone(rule: str, how: str) -> None:
    """Taken for one-hot, which conditions on the token that was drawn: the law of the output is p all the same."""
    rng = np.random.default_rng(11)
    fewer = 0.0
    for vocabulary, k in ((3, 1), (3, 2), (4, 2), (3, 3)):
        for _ in range(8):
            world = random_world(rng, vocabulary, k, "free")
            cut = how == "cut after the draw"
            broken = (CutWorld if cut else BrokenWorld)(
                vocabulary, k, world.p, world.q, *([] if cut else [BREAKS[how]])
            )
            total, accepted = law(broken, RULES[rule])
            assert np.abs(total - product(world)).max() < 1e-12
            fewer += law(world, RULES[rule])[1] - accepted
    assert fewer > 0


def test_usable_supports_are_renormalised() -> None:
    support = acceptance.usable_support(Support((2, 0), (0.50001, 0.5)), 0, 4)
    assert support is not None
    assert sum(support.probabilities) == pytest.approx(1, abs=1e-15)
    assert support.tokens == (2, 0)
