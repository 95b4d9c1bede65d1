"""What the probabilistic rules read of many rows: p at a few tokens, then a draw from what a rejection leaves.

Both are readings of row_program.py. Between the two the host decides (acceptance.rejection_stop, block_stop), so a pass
under these rules costs two copies to the host, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.algorithms.candidates import Kept
from actors.algorithms.noise import NoiseSource
from actors.algorithms.row_program import NONE, Logits, LogitsRow


def _probabilities(z: Logits, rows: Sequence[LogitsRow]) -> tuple[Tensor, Tensor]:
    """p [R, V] of adjusted logits, and whether a row holds a finite best score, bool [R, 1]."""
    scaled = z if isinstance(z, Tensor) else torch.stack(list(z))
    sound = scaled.amax(-1, keepdim=True).isfinite()
    if any(row.changes.sampling.temperature != 1 for row in rows):
        heat = [row.changes.sampling.temperature for row in rows]
        scaled = scaled / torch.tensor(heat, dtype=scaled.dtype, device=scaled.device)[:, None]
    return scaled.softmax(-1), sound


class _Named:
    """For each row a few tokens and a value for each: [R, S], padded with token -1 and value 0. By index of the row."""

    def __init__(self, entries: dict[int, tuple[Sequence[int], Sequence[float]]]) -> None:
        self._entries = entries
        self.width = max((len(tokens) for tokens, _ in entries.values()), default=0)

    def of(self, rows: Sequence[LogitsRow], like: Tensor) -> tuple[Tensor, Tensor]:
        """int64, and of the type of `like`."""
        tokens = np.full((len(rows), self.width), -1, dtype=np.int64)
        values = np.zeros((len(rows), self.width))
        for n, row in enumerate(rows):
            named, of_each = self._entries[row.index]
            tokens[n, : len(named)] = named
            values[n, : len(of_each)] = of_each
        return torch.from_numpy(tokens).to(like.device), torch.from_numpy(values).to(like.device, like.dtype)


class TokenMasses:
    """p at some tokens of each row. named: by index of the row."""

    def __init__(self, named: dict[int, Sequence[int]]) -> None:
        self._named = _Named({index: (tokens, ()) for index, tokens in named.items()})
        self.width = max(1, self._named.width)

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        p, sound = _probabilities(z, rows)
        tokens, _ = self._named.of(rows, p)  # [R, S]
        if not self._named.width:
            return torch.where(sound, 0.0, NONE)
        return torch.where(sound, p.gather(1, tokens.clamp(min=0)), NONE)

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        p = kept.scaled.softmax(-1)  # [R, C]
        tokens, _ = self._named.of(rows, p)
        if not self._named.width:
            return torch.zeros_like(p[:, :1])
        columns = [(p * (kept.ids == tokens[:, s : s + 1])).sum(-1) for s in range(tokens.shape[1])]
        return torch.stack(columns, 1)


@dataclass(frozen=True, slots=True)
class Residual:
    """y = (weight p - q)+, or p where weight is None; `token` was rejected. As of acceptance.residual."""

    tokens: Sequence[int] = ()
    q: Sequence[float] = ()
    token: int = -1
    weight: float | None = None


class ResidualDraw:
    """One token from each row's residual, by the row's noise. residuals: by index of the row."""

    width = 1

    def __init__(self, residuals: dict[int, Residual]) -> None:
        self._residuals = residuals
        self._named = _Named({index: (each.tokens, each.q) for index, each in residuals.items()})

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        p, sound = _probabilities(z, rows)
        named, values = self._named.of(rows, p)
        q = torch.zeros_like(p).scatter_add_(1, named.clamp(min=0), values)  # [R, V]
        columns = torch.arange(p.shape[1], device=p.device)
        y = self._residual(p, q, columns, rows)
        noise = NoiseSource(p.shape[1], p.dtype, len(rows), p.device).negated_exponential([row.key for row in rows])
        return torch.where(sound, noise.div_(y).argmax(-1, keepdim=True), NONE)

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        p = kept.scaled.softmax(-1)  # [R, C]
        named, values = self._named.of(rows, p)
        q = torch.zeros_like(p)
        for s in range(named.shape[1]):
            q += torch.where(kept.ids == named[:, s : s + 1], values[:, s : s + 1], 0.0)
        y = self._residual(p, q, kept.ids, rows)
        noise = NoiseSource(kept.ids, p.dtype, len(rows)).negated_exponential([row.key for row in rows])
        return kept.ids.gather(1, noise.div_(y).argmax(-1, keepdim=True))

    def _residual(self, p: Tensor, q: Tensor, ids: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """y, not normalised. Where rounding leaves nothing of it, p without the rejected token, or p itself."""
        asked = [self._residuals[row.index] for row in rows]

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=p.dtype, device=p.device)[:, None]

        token = torch.tensor([each.token for each in asked], device=p.device)[:, None]
        y = (column([1.0 if each.weight is None else each.weight for each in asked]) * p - q).clamp_(min=0)
        others = p.masked_fill(ids == token, 0.0)
        y = torch.where(y.sum(-1, keepdim=True) > 0, y, others)
        return torch.where(y.sum(-1, keepdim=True) > 0, y, p)
