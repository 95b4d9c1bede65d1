"""What masks, bias and penalties change in many rows of logits, as lists of single entries.

A row of a pass has a history of its own: the committed text and the tokens on *its* branch of a path or tree of drafts.
Rows go in as a base history with an extension each; the edits of all rows become flat indices and values, so that
applying them is a handful of tensor operations whatever the number of rows. Order and arithmetic are those of
`sampling.adjust`, which does the same to one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms.sampling import Columns, History, penalises
from actors.settings import SamplingSettings


class BranchHistory:
    """The history of one row: a base, which many rows share and none changes, and the tokens of its branch past it."""

    def __init__(self, base: History, path: Sequence[int] = ()) -> None:
        self._base, self._path = base, path

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return self._base.length + len(self._path)

    def ends_with(self, words: Sequence[int]) -> bool:
        """Do `words` stand at the end? Not more of them than the settings' longest bad word holds, less its last."""
        count = len(words)
        if not count:
            return True
        tail = [*self._base.tail, *self._path][-count:]
        return tuple(tail) == tuple(words)

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Ids of the answer, how often each was said, and the ids said in prompt and answer."""
        base = self._base
        if not self._path:
            return base.answered, base.times, base.said
        times = base.times.copy()
        fresh: dict[int, float] = {}
        for token in self._path:
            place = base.place(token)
            if place is None:
                fresh[token] = fresh.get(token, 0.0) + 1.0
            else:
                times[place] += 1.0
        if not fresh:
            return base.answered, times, base.said
        unseen = [token for token in fresh if not base.in_prompt(token)]
        return (
            np.concatenate([base.answered, np.fromiter(fresh, np.int64, len(fresh))]),
            np.concatenate([times, np.fromiter(fresh.values(), np.float64, len(fresh))]),
            np.concatenate([base.said, np.array(unseen, dtype=np.int64)]),
        )


@dataclass(frozen=True, slots=True)
class EditedRow:
    """What is to be changed in one row. history: None where the settings need none (`sampling.adjusts` is False).

    mask: bool [V], what a grammar allows; None where the answer is free.
    """

    sampling: SamplingSettings
    history: BranchHistory | None = None
    mask: Tensor | None = None
    eos: Sequence[int] = ()

    @property
    def changes(self) -> bool:
        return self.history is not None or self.mask is not None


class _Entries:
    """Columns of single entries, and a value for each, row by row."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []

    def add(self, row: int, columns: NDArray[np.int64], values: NDArray[np.float64] | float = 0.0) -> None:
        self._places.append(columns + row * self._size)
        self._values.append(np.full(len(columns), values) if isinstance(values, float) else values)

    def __bool__(self) -> bool:
        return bool(self._places)

    def on(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Places in the flattened `rows`, int64 [L], and values of their type [L]."""
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        return torch.from_numpy(places).to(rows.device), torch.from_numpy(values).to(rows.device, rows.dtype)


def edit(rows: Tensor, edits: Sequence[EditedRow], columns: Columns | None = None) -> None:
    """Apply each row's masks, bias and penalties to `rows` [R, V] in place; what cannot be chosen becomes -inf.

    columns: where a row holds only some of the vocabulary, as of `sampling.adjust`.
    """
    size = rows.shape[1]
    columns = columns or Columns(size)
    allowed, banned, bias, repeated, answered = (_Entries(size) for _ in range(5))
    restricted: list[int] = []
    for n, row in enumerate(edits):
        if row.history is None:
            continue
        settings, history = row.sampling, row.history
        if settings.allowed_token_ids is not None:
            restricted.append(n)
            allowed.add(n, columns.array(settings.allowed_token_ids))
        forbidden = _forbidden(settings, history, row.eos)
        if forbidden:
            banned.add(n, columns.array(forbidden))
        if settings.logit_bias:
            places, held = columns.places(np.fromiter(settings.logit_bias, np.int64, len(settings.logit_bias)))
            bias.add(n, places, np.fromiter(settings.logit_bias.values(), np.float64, len(held))[held])
        if penalises(settings):
            ids, times, said = history.counts()
            if settings.repetition_penalty != 1:
                repeated.add(n, columns.places(said)[0], settings.repetition_penalty)
            if settings.presence_penalty or settings.frequency_penalty:
                places, held = columns.places(ids)
                answered.add(n, places, settings.frequency_penalty * times[held] + settings.presence_penalty)
    flat = rows.view(-1)  # [R * V]
    _mask(rows, edits)
    if restricted:
        where, _ = allowed.on(rows)
        kept = flat[where]
        rows[restricted] = -math.inf
        flat[where] = kept
    if banned:
        flat[banned.on(rows)[0]] = -math.inf
    if bias:
        where, values = bias.on(rows)
        flat[where] += values
    if repeated:
        where, factors = repeated.on(rows)
        scores = flat[where]
        flat[where] = torch.where(scores > 0, scores / factors, scores * factors)
    if answered:
        where, losses = answered.on(rows)
        flat[where] -= losses


def _mask(rows: Tensor, edits: Sequence[EditedRow]) -> None:
    masked = [n for n, row in enumerate(edits) if row.mask is not None]
    if not masked:
        return
    if rows.device.type == "cpu":
        for n in masked:
            mask = edits[n].mask
            assert mask is not None
            rows[n].masked_fill_(~mask, -math.inf)
        return
    # A bit for each token crosses to the device.
    bits = np.stack([np.packbits(_array(edits[n].mask), bitorder="little") for n in masked])
    packed = torch.from_numpy(bits).to(rows.device)[:, :, None]  # [G, V / 8, 1]
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    free = ((packed >> shifts) & 1).bool().view(len(masked), -1)[:, : rows.shape[1]]  # [G, V]
    places = torch.tensor(masked, device=rows.device)
    rows[places] = rows[places].masked_fill_(~free, -math.inf)


def _array(mask: Tensor | None) -> NDArray[np.bool_]:
    assert mask is not None
    array: NDArray[np.bool_] = mask.cpu().numpy()
    return array


def _forbidden(settings: SamplingSettings, history: BranchHistory, eos: Iterable[int]) -> list[int]:
    """Ids that must not follow: the last of a bad word that stands there else, and all that end a short answer."""
    found = [word[-1] for word in settings.bad_words if word and history.ends_with(word[:-1])]
    if history.length < settings.min_tokens:
        found += [*eos, *settings.stop_token_ids]
    return found
