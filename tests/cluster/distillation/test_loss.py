"""The loss and its hand-made gradient, against automatic differentiation of the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cluster.distillation.loss import Goal, Measures, distillation_loss

V, COLUMNS, WIDTH = 12, 9, 5


def case(n: int = 700, top: int = 6) -> tuple[Tensor, Tensor, Goal, Tensor]:
    """More positions than one chunk; three of the twelve ids are not in the draft's vocabulary."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(n, WIDTH, generator=generator)
    head = torch.randn(COLUMNS, WIDTH, generator=generator)
    logp, ids = torch.randn(n, V, generator=generator).log_softmax(-1).topk(top, -1)
    column_of = torch.full((V,), -1)
    column_of[torch.tensor([0, 1, 3, 4, 5, 6, 8, 9, 11])] = torch.arange(COLUMNS)
    return hidden, head, Goal.of(ids.int(), logp.half(), column_of), logp


def formula(hidden: Tensor, head: Tensor, goal: Goal, weight: float) -> Tensor:
    q = (hidden @ head.T).softmax(-1).gather(1, goal.columns)
    cross_entropy = -(goal.p * torch.where(goal.p > 0, q, 1).log()).sum(-1)
    overlap = torch.where(goal.p > 0, torch.minimum(goal.p, q), 0).sum(-1)
    return (cross_entropy + weight * (1 - overlap)).mean()


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_value_and_gradient_are_those_of_the_formula(weight: float) -> None:
    hidden, head, goal, _ = case()
    one, two = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, measures = distillation_loss(one, head, goal, weight)
    expected = formula(two, head, goal, weight)
    (3 * loss).backward()  # type: ignore[no-untyped-call]
    (3 * expected).backward()  # type: ignore[no-untyped-call]
    assert one.grad is not None
    assert two.grad is not None
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-7)
    assert measures.positions == 700


def test_p_keeps_what_the_vocabulary_lacks_out() -> None:
    _, _, goal, logp = case()
    inside = goal.p > 0
    whole = logp.half().float().softmax(-1)
    torch.testing.assert_close(goal.p[inside], whole[inside])
    assert 0 < int((goal.best < 0).sum()) < 700
    assert bool((goal.columns >= 0).all())


def test_measures() -> None:
    """A head that says exactly p: the overlap is all of p's mass, and every likeliest token agrees."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]])
    goal = Goal(torch.tensor([[0, 1, 2], [2, 0, 1]]), p, torch.tensor([0, 2]))
    logits = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.2, 0.5]]).log()
    _, measures = distillation_loss(logits, torch.eye(3), goal, 1.0)
    assert measures.agreed == 2
    assert measures.mean_overlap == pytest.approx(1.0, abs=1e-6)
    entropy = -float((p * p.log()).sum()) / 2
    assert measures.loss == pytest.approx(entropy, abs=1e-6)
    total = Measures()
    total.add(measures)
    total.add(measures)
    assert (total.positions, total.agreement) == (4, 1.0)
