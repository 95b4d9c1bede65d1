"""What is read from many rows of logits, each with settings, noise and a history of its own, as one tensor program.

A row knows nothing of blocks, trees or positions in them: whoever asks names the row of logits, the history (committed
text and the tokens on the row's own branch) and the key of its noise. What is read of a row goes into one tensor
[R, W], which is copied to the host once; rows whose filters keep more tokens than were looked at cost a second round.

Rows are worked on in chunks: no copy of all logits is made, in float32 or otherwise. On a CPU a chunk fits the cache,
and what NumPy or a single row does faster is done so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms import sampling
from actors.algorithms.candidates import Kept, chunks, filter_chunk, filter_rows
from actors.algorithms.row_edits import EditedRow, edit
from actors.settings import SamplingSettings

Logits = Tensor | Sequence[Tensor]
"""Rows [V] of one type, float32 or float64: as a tensor [R, V], or on a CPU perhaps one by one."""
NONE = -1
"""No token can be chosen in a row: it has no finite score."""
_UNSURE = -2


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """index: of the row in the logits. key: of its noise (noise.row_key). changes: settings, history and mask."""

    index: int
    key: int
    changes: EditedRow

    @property
    def is_filtered(self) -> bool:
        settings = self.changes.sampling
        return not settings.greedy and sampling.filters(settings)


class Reading(Protocol):
    """What is to be known of rows: `width` numbers each, in float64. The first is NONE where there is nothing."""

    width: int

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        """[R, width] of rows without filters. z: their adjusted logits, not to be changed."""

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        """[R, width] of the rows whose filters left `kept`."""


class RowProgram:
    """Reads rows of `logits` [N, V], of any float type.

    vocabulary: the id of each column, int64 [V], if not itself. at_once: without waiting for the device in between;
    False is for CPUs.
    """

    def __init__(self, logits: Tensor, vocabulary: Tensor | None = None, *, at_once: bool) -> None:
        self._logits = logits
        self._on_cpu = not at_once
        self._dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
        self._spare: Tensor | None = None
        self._columns = sampling.Columns(logits.shape[1], vocabulary)

    @property
    def size(self) -> int:
        """V"""
        return self._logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self._logits.device

    @property
    def dtype(self) -> torch.dtype:
        """float64 if the logits are, otherwise float32."""
        return self._dtype

    def read(self, rows: Sequence[LogitsRow], reading: Reading) -> NDArray[np.float64]:
        """[R, width], on the host."""
        if not rows:
            return np.zeros((0, reading.width))
        found = self._round(rows, reading, again=False)
        unsure = np.flatnonzero(found[:, 0] == _UNSURE).tolist()
        if unsure:
            found[unsure] = self._round([rows[n] for n in unsure], reading, again=True)
        return found

    def _round(self, rows: Sequence[LogitsRow], reading: Reading, *, again: bool) -> NDArray[np.float64]:
        device = self._logits.device
        shape = (len(rows), reading.width)
        out = torch.full(shape, NONE if again else _UNSURE, dtype=torch.float64, device=device)
        free = [n for n, row in enumerate(rows) if not row.is_filtered]
        if free:
            values = [reading.of_all(z, [rows[free[n]] for n in part]) for part, z in self._adjusted(rows, free)]
            out[torch.tensor(free, device=device)] = torch.cat(values).to(out.dtype)
        filtered = [n for n, row in enumerate(rows) if row.is_filtered]
        for kept in self._kept(rows, filtered, again):
            places = np.array(filtered)[kept.rows]
            found = reading.of_kept(kept, [rows[n] for n in places]).to(out.dtype)
            out[torch.from_numpy(places).to(device)] = torch.where(
                kept.sure[:, None], found, NONE if again else _UNSURE
            )
        copied: NDArray[np.float64] = out.cpu().numpy()
        return copied

    def _kept(self, rows: Sequence[LogitsRow], filtered: list[int], again: bool) -> Iterator[Kept]:
        """What the filters leave of `filtered`; the numbers in it are places in `filtered`."""
        settings = [rows[n].changes.sampling for n in filtered]
        parts = self._adjusted(rows, filtered)
        if not self._on_cpu:
            for places, z in parts:
                assert isinstance(z, Tensor)
                yield filter_chunk(z, [settings[n] for n in places], places[0], whole=again)
        elif again:
            for n, row in enumerate(row for _, z in parts for row in z):
                alone = _alone(n, row, settings[n])
                if alone is not None:
                    yield alone
        elif filtered:
            yield from filter_rows((row for _, z in parts for row in z), settings)

    def _adjusted(self, rows: Sequence[LogitsRow], numbers: list[int]) -> Iterator[tuple[range, Logits]]:
        """Rows in chunks: places in `numbers`, and logits [R, V] after masks, bias and penalties.

        Each chunk is to be read before the next one is asked for. Rows that nothing changes are views.
        """
        changed = any(rows[n].changes.changes for n in numbers)
        size, device = self._logits.shape[1], self._logits.device
        as_they_are = not changed and self._logits.dtype == self._dtype
        if as_they_are and self._on_cpu and numbers:
            indices = [rows[n].index for n in numbers]
            yield range(len(numbers)), self._run(indices) if _follow(indices) else [self._logits[i] for i in indices]
            return
        for places in chunks(len(numbers), size, device):
            part = [rows[numbers[place]] for place in places]
            indices = [row.index for row in part]
            if as_they_are and _follow(indices):
                yield places, self._run(indices)
                continue
            z = self._copy(indices)
            if changed:
                edit(z, [row.changes for row in part], self._columns)
            yield places, z

    def _run(self, indices: list[int]) -> Tensor:
        return self._logits[indices[0] : indices[-1] + 1]

    def _copy(self, indices: list[int]) -> Tensor:
        places = torch.tensor(indices, device=self._logits.device)
        if self._on_cpu and self._logits.dtype == self._dtype:
            if self._spare is None or len(self._spare) < len(indices):  # memory from the system costs more than a copy
                self._spare = self._logits.new_empty(len(indices), self._logits.shape[1])
            return torch.index_select(self._logits, 0, places, out=self._spare[: len(indices)])
        return self._logits[places].to(self._dtype)


def _follow(indices: list[int]) -> bool:
    return indices == list(range(indices[0], indices[-1] + 1))


def _alone(place: int, row: Tensor, settings: SamplingSettings) -> Kept | None:
    """One row [V] on a CPU, by itself; None if it has no finite score."""
    if not np.isfinite(sampling.largest(row)):
        return None
    ids, scaled = sampling.kept(row, settings)
    return Kept(np.array([place]), ids[None], scaled[None], torch.ones(1, dtype=torch.bool))
