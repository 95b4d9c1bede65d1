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
from actors.algorithms.gumbel_max import GumbelMax
from actors.algorithms.noise import NoiseSource, gumbel_of_words
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


class CoupledChoice:
    """The coupled rule's token, argmax(log p + g) of the filtered distribution; the best token where greedy."""

    width = 1

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, *, at_once: bool) -> None:
        """at_once: as of RowProgram."""
        self._size, self._dtype, self._device = size, dtype, device
        self._on_cpu = not at_once
        self._race: GumbelMax | None = None

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        if self._on_cpu:
            return torch.from_numpy(self._on_host(z, rows))[:, None]
        assert isinstance(z, Tensor)
        if not all(row.changes.sampling.greedy for row in rows):
            heat = [0.0 if row.changes.sampling.greedy else row.changes.sampling.temperature for row in rows]
            noise = NoiseSource(self._size, z.dtype, len(rows), z.device).negated([row.key for row in rows])
            z = torch.addcmul(z, noise, torch.tensor(heat, dtype=z.dtype, device=z.device)[:, None], value=-1)
        best, tokens = z.max(-1)
        return torch.where(best.isfinite(), tokens, NONE)[:, None]

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        keys = [row.key for row in rows]
        source = NoiseSource(kept.ids, self._dtype, len(keys))
        if self._on_cpu:  # in double precision, as for one row
            noise = torch.from_numpy(gumbel_of_words(source.words(keys).numpy().view(np.uint32)))
            scores = kept.scaled.double() + noise
        else:
            scores = kept.scaled - source.negated(keys)
        return kept.ids.gather(1, scores.argmax(-1, keepdim=True))

    def _on_host(self, z: Logits, rows: Sequence[LogitsRow]) -> NDArray[np.int64]:
        """NumPy's argmax is vectorised, torch's on a CPU is not; and a single row's noise stays in the cache."""
        lines = z.numpy() if isinstance(z, Tensor) else [row.numpy() for row in z]
        best = lines.argmax(-1) if isinstance(lines, np.ndarray) else np.array([line.argmax() for line in lines])
        for n, row in enumerate(rows):
            settings = row.changes.sampling
            if not np.isfinite(lines[n][best[n]]):
                best[n] = NONE
            elif not settings.greedy:
                if self._race is None:
                    self._race = GumbelMax(self._size, self._dtype, self._device)
                best[n] = self._race.winner(z[n], settings.temperature, row.key)
        return best


class BestPerturbed:
    """The `count` best columns by log q + g, or by log q where greedy, and the softmax of these scores at each.

    vocabulary: the id of each column, as of RowProgram.
    """

    def __init__(self, count: int, vocabulary: Tensor | None = None) -> None:
        self.width = 2 * count
        self._count, self._vocabulary = count, vocabulary

    def parts(self, found: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Of what was read of a row: columns and confidences, which are not above 0 where there is nothing."""
        return found[: self._count].astype(np.int64), found[self._count :]

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        if not isinstance(z, Tensor) or z.device.type == "cpu":  # a row at a time stays in the cache
            return torch.cat([self._rank(self._perturbed(row[None], [ask])) for row, ask in zip(z, rows, strict=True)])
        return self._rank(self._perturbed(z, rows))

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        tokens = kept.ids if self._vocabulary is None else self._vocabulary[kept.ids]
        noise = NoiseSource(tokens, kept.scaled.dtype, len(rows)).negated([row.key for row in rows])
        return self._rank(kept.scaled - noise, kept.ids)

    def _perturbed(self, z: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """[R, V]"""
        if all(row.changes.sampling.greedy for row in rows):
            return z
        greedy = torch.tensor([row.changes.sampling.greedy for row in rows], device=z.device)[:, None]
        heat = [1.0 if row.changes.sampling.greedy else row.changes.sampling.temperature for row in rows]
        tokens = z.shape[1] if self._vocabulary is None else self._vocabulary
        noise = NoiseSource(tokens, z.dtype, len(rows), z.device).negated([row.key for row in rows])
        scaled = z / torch.tensor(heat, dtype=z.dtype, device=z.device)[:, None]
        return scaled.sub_(noise.masked_fill_(greedy, 0.0))

    def _rank(self, scores: Tensor, ids: Tensor | None = None) -> Tensor:
        best, places = scores.topk(min(self._count, scores.shape[1]))  # [R, B]
        confidences = (best - scores.logsumexp(-1, keepdim=True)).exp()
        columns = places if ids is None else ids.gather(1, places)
        missing = self._count - columns.shape[1]
        return torch.cat([_padded(columns.double(), missing), _padded(confidences.double(), missing)], 1)


class MostLikely:
    """The `count` best columns by q, their log q but for a constant, best first, and log of the sum over all of q."""

    def __init__(self, count: int) -> None:
        self.width = 2 * count + 1

    @staticmethod
    def parts(found: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        """Of what was read of a row: columns, scores (-inf where there is nothing) and the log of the sum."""
        count = len(found) // 2
        if found[0] == NONE or not np.isfinite(found[count]):
            return np.zeros(0, dtype=np.int64), np.zeros(0), 0.0
        return found[:count].astype(np.int64), found[count:-1], float(found[-1])

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        if not isinstance(z, Tensor):
            z = torch.stack(list(z))
        heat = [row.changes.sampling.temperature for row in rows]
        return self._rank(z / torch.tensor(heat, dtype=z.dtype, device=z.device)[:, None])

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        return self._rank(kept.scaled, kept.ids)

    def _rank(self, scaled: Tensor, ids: Tensor | None = None) -> Tensor:
        count = self.width // 2
        best, places = scaled.topk(min(count, scaled.shape[1]))  # [R, S]
        columns = places if ids is None else ids.gather(1, places)
        missing = count - columns.shape[1]
        total = scaled.logsumexp(-1, keepdim=True)
        return torch.cat([_padded(columns.double(), missing), _padded(best.double(), missing, -torch.inf), total], 1)


def _padded(values: Tensor, missing: int, value: float = 0.0) -> Tensor:
    """[R, B + missing]"""
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing else values
