"""The training loss: from hidden states to a number, through a frozen head, without keeping a row of logits.

L = CE(p, q) + w (1 - sum_i min(p_i, q_i)), the mean over positions. p is the target's distribution on its stored
support (what lies outside the draft's vocabulary is left out, so that a position weighs as much as can be learned
there), q the draft's over its own vocabulary. The second term is one minus the acceptance rate of the rejection rule
(Leviathan et al. 2023, Corollary 3.6); its use in distillation follows Zhou et al., "DistillSpec" (ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Measures:
    """Sums over the positions of a batch, filled while the loss is computed."""

    positions: int = 0
    cross_entropy: float = 0.0
    overlap: float = 0.0
    agreed: int = 0

    def add(self, other: Measures) -> None:
        """Take another batch in."""
        self.positions += other.positions
        self.cross_entropy += other.cross_entropy
        self.overlap += other.overlap
        self.agreed += other.agreed

    def as_list(self) -> list[float]:
        """The sums, for adding them up elsewhere; `of` reads them."""
        return [float(self.positions), self.cross_entropy, self.overlap, float(self.agreed)]

    @classmethod
    def of(cls, sums: Sequence[float]) -> Measures:
        """The inverse of as_list."""
        positions, cross_entropy, overlap, agreed = sums
        return cls(round(positions), cross_entropy, overlap, round(agreed))

    @property
    def agreement(self) -> float:
        """Share of positions where the draft's likeliest token is the target's."""
        return self.agreed / max(self.positions, 1)

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats."""
        return self.cross_entropy / max(self.positions, 1)

    @property
    def mean_overlap(self) -> float:
        """Mean of sum min(p, q)."""
        return self.overlap / max(self.positions, 1)


@dataclass(frozen=True, slots=True)
class Goal:
    """What q is to match at N positions.

    columns: int64 [N, K], columns of the head; p: float [N, K], zero where the token is none of the head's.
    best: int64 [N], the column of the target's likeliest token, -1 if it is none of the head's.
    """

    columns: Tensor
    p: Tensor
    best: Tensor

    @classmethod
    def of(cls, top_ids: Tensor, top_logp: Tensor, column_of: Tensor) -> Goal:
        """top_ids, top_logp: [N, K]; p is renormalised over them. column_of: int64 [V], -1 outside the vocabulary."""
        columns = column_of[top_ids.long()]
        p = top_logp.float().softmax(-1) * (columns >= 0)
        return cls(columns.clamp_min(0), p, columns[:, 0])


def distillation_loss(hidden: Tensor, head: Tensor, goal: Goal, acceptance_weight: float) -> tuple[Tensor, Measures]:
    """hidden: [N, E], any float type. head: [V', E], frozen. Returns the scalar loss and the batch's measures."""
    measures = Measures()
    loss: Tensor = _HeadLoss.apply(hidden, head, goal, acceptance_weight, measures)  # type: ignore[no-untyped-call]
    return loss, measures


_CHUNK = 512
"""Rows of logits alive at once."""


class _HeadLoss(torch.autograd.Function):
    """The head is frozen, so the gradient for `hidden` is known as soon as the logits are, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, goal: Goal, weight: float, measures: Measures) -> Tensor:
        n = hidden.shape[0]
        gradient = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        for start in range(0, n, _CHUNK):
            part = slice(start, start + _CHUNK)
            columns, p = goal.columns[part], goal.p[part]
            log_q = (hidden[part].to(head.dtype) @ head.T).float()  # [n, V'], logits so far
            measures.agreed += int((log_q.argmax(-1) == goal.best[part]).sum())
            log_q -= log_q.logsumexp(-1, keepdim=True)
            log_q_support = log_q.gather(1, columns)
            q_support = log_q_support.exp()
            measures.cross_entropy -= float((p * log_q_support).sum())
            measures.overlap += float(torch.minimum(p, q_support).sum())
            # d CE / dz = mass(p) q - p;  d(-sum min) / dz = q Q_A - q [in A], where A = {q < p} and Q_A its mass.
            low = weight * q_support * ((q_support < p) & (p > 0))
            slope = log_q.exp_().mul_(p.sum(-1, keepdim=True) + low.sum(-1, keepdim=True))
            slope.scatter_add_(1, columns, -(p + low))
            gradient[part] = (slope.to(head.dtype) @ head).float()
        measures.positions = n
        ctx.save_for_backward((gradient / n).to(hidden.dtype))
        value = (measures.cross_entropy + weight * (n - measures.overlap)) / n
        return torch.tensor(value, dtype=torch.float32, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return outputs[0] * gradient, None, None, None, None
