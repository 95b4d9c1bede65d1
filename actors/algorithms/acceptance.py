"""The acceptance rules: which prefix of a block of draft tokens stands, and what the token after it is drawn from.

Pure functions; the randomness is an argument. Names are the papers': X_1..X_k the draft tokens, p the target's
distributions (k + 1 of them, the last one follows the whole block), q the draft's, eta uniform on (0, 1), tau the
number of accepted tokens. q comes as a sparse support; None is a deterministic draft (one-hot at its token).

A rule that says (tau, y) means: commit X_1..X_tau, then one token drawn from y.

q must be the distribution that the token was really drawn from. One-hot is right for every draft, however its token
came about, because it conditions on the token; it accepts less. So `usable_support` falls back to it when a support
cannot be what the token was drawn from: also for a token that a support was cut off from after the draw, since the
others are then drawn from what is left of it. A draft that tells a possible but wrong q biases the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.messages import Support

_SUM_TOLERANCE = 1e-3


class Rows(Protocol):
    """Distributions by position; they may be made when asked for. A tensor [k + 1, V] is one."""

    def __getitem__(self, i: int, /) -> Tensor: ...


class Choices(Protocol):
    """The target's own tokens by position; they may be made when asked for."""

    def __getitem__(self, i: int, /) -> int: ...


class Masses(Protocol):
    """Distributions by position, of which a few tokens' probabilities are all that can be asked for."""

    def at(self, i: int, tokens: Sequence[int], /) -> Sequence[float]:
        """p_i of these tokens."""


@dataclass(frozen=True, slots=True)
class Stop:
    """tau accepted draft tokens, and what follows: a draw from (weight p - q)+ there; from p where weight is None."""

    tau: int
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """tau accepted draft tokens, and y [V], the distribution (not normalised) of the token that follows them."""

    tau: int
    y: Tensor


def usable_support(support: Support | None, token: int, vocabulary: int) -> Support | None:
    """`support`, renormalised in float64, if `token` can have been drawn from it; None (one-hot) otherwise."""
    if support is None or len(support.tokens) != len(support.probabilities) or token not in support.tokens:
        return None
    if len(set(support.tokens)) != len(support.tokens) or not all(0 <= t < vocabulary for t in support.tokens):
        return None
    total = math.fsum(support.probabilities)
    sound = all(p >= 0 for p in support.probabilities) and abs(total - 1) < _SUM_TOLERANCE  # False for NaN
    if not sound or support.probabilities[support.tokens.index(token)] <= 0:
        return None
    return Support(support.tokens, tuple(p / total for p in support.probabilities))


def coupled(choices: Choices, x: Sequence[int]) -> int:
    """tau when the target's own choices (argmax of log p + g, or greedy) are known: drafts stand while they agree.

    choices may stop after the first disagreement. Daliri, Musco, Suresh, "Coupling without communication and
    drafter-invariant speculative decoding" (2024), Algorithm 1 with Gumbel noise.
    """
    tau = 0
    while tau < len(x) and choices[tau] == x[tau]:
        tau += 1
    return tau


def rejection(p: Rows, q: Sequence[Support | None], x: Sequence[int], eta: Sequence[float]) -> Decision:
    """Token by token: accept X_i with min(1, p/q), else draw from (p - q)+.

    Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding" (ICML 2023), Algorithm 1;
    Chen et al., "Accelerating large language model decoding with speculative sampling" (2023), Algorithm 2.
    Asks for p[0], p[1], ... up to the first rejection only.
    """
    return _decision(p, q, x, rejection_stop(_Dense(p), q, x, eta))


def rejection_stop(p: Masses, q: Sequence[Support | None], x: Sequence[int], eta: Sequence[float]) -> Stop:
    """What `rejection` decides, from the probabilities of the draft tokens alone."""
    for i, token in enumerate(x):
        if not eta[i] < _ratio(p.at(i, (token,))[0], q[i], token):
            return Stop(i, 1.0)
    return Stop(len(x))


def block(p: Rows, q: Sequence[Support | None], x: Sequence[int], eta: Sequence[float]) -> Decision:
    """The whole block jointly: tau is the last i with eta_i <= h_i, and y is (p_tau p - q)+.

    Sun et al., "Block verification accelerates speculative decoding" (ICLR 2025), Algorithm 2. Every eta takes part
    in the decision, also those past tau, so none may be used again in a later pass.
    """
    return _decision(p, q, x, block_stop(_Dense(p), q, x, eta))


def block_stop(p: Masses, q: Sequence[Support | None], x: Sequence[int], eta: Sequence[float]) -> Stop:
    """What `block` decides, from the probabilities of the draft tokens and of q's supports."""
    p_i, h = _block_acceptance(p, q, x)
    tau = next((i for i in range(len(x), 0, -1) if eta[i - 1] <= h[i - 1]), 0)
    return Stop(tau, None if tau == len(x) else p_i[tau])


def block_acceptance(p: Rows, q: Sequence[Support | None], x: Sequence[int]) -> tuple[list[float], list[float]]:
    """p_0..p_k and h_1..h_k of block verification.

    p_i = min(p_{i-1} p(X_i)/q(X_i), 1) with p_0 = 1; h_i = s_i / (s_i + 1 - p_i) with s_i the sum of (p_i p - q)+
    over the tokens that may follow X_i, and h_k = p_k. Where both terms vanish (p = q, p_i = 1) the block goes on, so
    h_i = 1. It follows that a token that is rejected is never drawn again as its own correction.
    """
    return _block_acceptance(_Dense(p), q, x)


def _block_acceptance(p: Masses, q: Sequence[Support | None], x: Sequence[int]) -> tuple[list[float], list[float]]:
    k = len(x)
    p_i = [1.0]
    for i, token in enumerate(x):
        p_i.append(min(p_i[-1] * _ratio(p.at(i, (token,))[0], q[i], token), 1.0) if p_i[-1] > 0 else 0.0)
    h = []
    for i in range(1, k):
        if p_i[i] == 0:  # the target cannot say X_i, so what it would say afterwards is never asked for
            h.append(0.0)
            continue
        s = _residual_mass(p, i, q[i], x[i], p_i[i])
        rest = 1 - p_i[i]
        h.append(1.0 if rest <= 0 else s / (s + rest))
    return p_i, [*h, p_i[k]] if k else []


def typical(p: Rows, choices: Choices, x: Sequence[int], epsilon: float = 0.09, delta: float = 0.3) -> int:
    """tau of typical acceptance: X_i stands if p(X_i) > min(epsilon, delta exp(-H(p))), or if it is the choice anyway.

    RELAXED: the output is not distributed as p. Cai et al., "Medusa" (2024), section 3.3.1. `choices` may be lazy.
    """
    for i, token in enumerate(x):
        row = p[i]
        mass = float(row[token])
        if mass > epsilon:  # whatever the entropy
            continue
        entropy = float(torch.special.entr(row).sum())
        if not mass > min(epsilon, delta * math.exp(-entropy)) and choices[i] != token:
            return i
    return len(x)


def acceptance_ratio(p: Tensor, q: Support | None, token: int) -> float:
    """p/q at `token`; a ratio of 1 or more is certain acceptance."""
    return _ratio(float(p[token]), q, token)


def _ratio(mass: float, q: Support | None, token: int) -> float:
    return mass if q is None else mass / q.probabilities[q.tokens.index(token)]


def _residual_mass(p: Masses, i: int, q: Support | None, token: int, weight: float) -> float:
    """Sum of (weight * p_i - q)+, from the entries of the support alone."""
    tokens, probabilities = _entries(q, token)
    masses = p.at(i, tokens)
    left = math.fsum(max(0.0, weight * mass - each) for mass, each in zip(masses, probabilities, strict=True))
    return weight * max(0.0, 1 - math.fsum(masses)) + left


class _Dense:
    """Masses of distributions over the whole vocabulary."""

    def __init__(self, p: Rows) -> None:
        self._p = p

    def at(self, i: int, tokens: Sequence[int], /) -> Sequence[float]:
        row = self._p[i]
        if len(tokens) == 1:
            return (float(row[tokens[0]]),)
        values: list[float] = row[torch.tensor(tokens, dtype=torch.int64, device=row.device)].tolist()
        return values


def _decision(p: Rows, q: Sequence[Support | None], x: Sequence[int], stop: Stop) -> Decision:
    tau = stop.tau
    return Decision(tau, p[tau] if stop.weight is None else residual(p[tau], q[tau], x[tau], stop.weight))


def residual(p: Tensor, q: Support | None, token: int, weight: float) -> Tensor:
    """(weight * p - q)+ [V]. Where rounding leaves nothing of it (p = q), p itself with the rejected token left out."""
    tokens, probabilities = _dense_support(p, q, token)
    y = weight * p
    y[tokens] = (y[tokens] - probabilities).clamp_(min=0)
    if not float(y.sum()) > 0:
        y = p.clone()
        y[token] = 0
        if not float(y.sum()) > 0:
            return p
    return y


def _dense_support(p: Tensor, q: Support | None, token: int) -> tuple[Tensor, Tensor]:
    tokens, probabilities = _entries(q, token)
    return (
        torch.tensor(tokens, dtype=torch.int64, device=p.device),
        torch.tensor(probabilities, dtype=p.dtype, device=p.device),
    )


def _entries(q: Support | None, token: int) -> tuple[Sequence[int], Sequence[float]]:
    """Tokens and probabilities of q; None is one-hot at `token`."""
    return ((token,), (1.0,)) if q is None else (q.tokens, q.probabilities)
