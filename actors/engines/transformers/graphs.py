"""Small passes of fixed shape, recorded once and replayed: CUDA graphs for a draft's steps.

A draft step is a few tokens through a few small layers. On a GPU the launches of its kernels take longer than the
kernels do; a graph launches them all at once, but every tensor must be where it was when it was recorded. So a pass is
padded to one of a few shapes (tokens, and cells that each may see), and its inputs are copied into buffers that stay.
Keys and values are in preallocated slots anyway.

A pass can be compiled first, so that fewer and larger kernels are recorded. The same logic runs on a CPU without
recording, and through torch.compile's tracer, which is how it is tested. Not measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from actors.engines.transformers.slots import SlotCache, SlotRow, cells_of, hidden_cells

MOST_TOKENS = 32
"""Longer passes (prompts) gain nothing: their kernels take longer than their launches."""
FEWEST_CELLS = 256
MOST_SHAPES = 64
"""Six numbers of tokens, and cells in powers of two up to a context of 128k."""
Replay = Callable[[], Tensor]
Record = Callable[[Callable[[], Tensor]], Replay]


@dataclass(frozen=True, slots=True)
class Shape:
    """tokens in a pass, and cells of its slot that each token may see; both are powers of two, or the whole slot."""

    tokens: int
    cells: int

    @classmethod
    def holding(cls, tokens: int, cells: int, whole: int) -> Shape:
        """The smallest shape for a pass of so many tokens that see cells below `cells` of `whole`."""
        return cls(_power(tokens, 1), min(_power(cells, FEWEST_CELLS), whole))


def _power(least: int, start: int) -> int:
    size = start
    while size < least:
        size *= 2
    return size


class StaticLayout:
    """Stands in for slots.Layout in passes of one shape. Its tensors stay where they are; `load` fills them."""

    def __init__(self, cache: SlotCache, shape: Shape) -> None:
        self.cache, self.shape = cache, shape
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        self.tokens = torch.zeros(1, shape.tokens, dtype=torch.long, device=device)
        self.positions = torch.zeros(1, shape.tokens, dtype=torch.long, device=device)
        self._slots = torch.zeros(shape.tokens, dtype=torch.long, device=device)
        self._cells = torch.zeros(shape.tokens, dtype=torch.long, device=device)
        self._mask = torch.zeros(shape.tokens, 1, 1, shape.cells, dtype=dtype, device=device)

    def load(self, rows: Sequence[SlotRow]) -> None:
        """Take the inputs of a pass; rows of one slot stand next to each other.

        Padding repeats the first token, which writes the same keys and values to the same cell once more.
        """
        scratch, shape = self.cache.scratch, self.shape
        parts: list[Tensor] = []
        for slot, share in groupby(rows, key=lambda row: row.slot):
            mine = list(share)
            end = max(row.end(scratch) for row in mine)
            self.cache.claim(slot, end, shape.cells)
            parts.append(hidden_cells(mine, scratch, 0, shape.cells))
        hidden = torch.cat(parts)  # [T, cells]
        missing = shape.tokens - len(hidden)
        hidden = torch.cat([hidden, hidden[:1].expand(missing, -1)])
        additive = torch.zeros(hidden.shape, dtype=self._mask.dtype).masked_fill_(hidden, -torch.inf)
        self._mask.copy_(additive[:, None, None])
        _fill(self.tokens[0], [token for row in rows for token in row.tokens])
        _fill(self.positions[0], [position for row in rows for position in row.positions()])
        _fill(self._slots, [row.slot for row in rows for _ in row.tokens])
        _fill(self._cells, [cell for row in rows for cell in cells_of(row, scratch)])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """As slots.Layout.attend: query [1, H, T, D]; key, value [1, K, T, D]; returns [1, T, H, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self._slots, :, self._cells] = key[0].transpose(0, 1)
        values[self._slots, :, self._cells] = value[0].transpose(0, 1)
        heads, tokens, shared = query.shape[1], query.shape[2], key.shape[1]
        folded = query[0].transpose(0, 1).reshape(tokens, shared, heads // shared, -1)  # [T, K, H / K, D]
        mixed = functional.scaled_dot_product_attention(
            folded,
            keys[:, :, : self.shape.cells].index_select(0, self._slots),
            values[:, :, : self.shape.cells].index_select(0, self._slots),
            attn_mask=self._mask,
            scale=scaling,
        )
        return mixed.reshape(1, tokens, heads, -1)


def _fill(buffer: Tensor, values: Sequence[int]) -> None:
    padded = [*values, *[values[0]] * (len(buffer) - len(values))]
    buffer.copy_(torch.tensor(padded))


Call = Callable[[Tensor, Tensor, StaticLayout], Tensor]
"""The model over tokens and positions [1, T] with a layout; returns logits [T, V]."""
Compile = Callable[[Call], Call]


class GraphedPasses:
    """Runs the small passes of one model over one cache, a recording per shape.

    record: makes a replay of what it is given; by default a CUDA graph.
    """

    def __init__(
        self,
        call: Call,
        cache: SlotCache,
        record: Record | None = None,
    ) -> None:
        self._call, self._cache = call, cache
        self._record = record or record_graph
        self._passes: dict[Shape, tuple[StaticLayout, Replay]] = {}

    @property
    def shapes(self) -> int:
        """How many have been recorded."""
        return len(self._passes)

    def run(self, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor | None:
        """Logits [len(keep), V] after the tokens `keep`; None when the pass is not small."""
        count = sum(len(row.tokens) for row in rows)
        if not 0 < count <= MOST_TOKENS:
            return None
        scratch = self._cache.scratch
        last = max(row.end(scratch) for row in rows)
        shape = Shape.holding(count, max(last, scratch), self._cache.keys[0].shape[2])
        if shape not in self._passes:
            layout = StaticLayout(self._cache, shape)
            layout.load(rows)
            self._passes[shape] = (layout, self._record(lambda: self._call(layout.tokens, layout.positions, layout)))
        layout, replay = self._passes[shape]
        layout.load(rows)
        logits = replay()
        return logits[torch.tensor(keep, dtype=torch.long, device=logits.device)]


def record_graph(work: Callable[[], Tensor]) -> Replay:
    """A CUDA graph of `work`, which is run a few times first, as PyTorch asks for."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result.clone()

    return replay


def compile_pass(call: Call, backend: str | Callable[..., Any] = "inductor") -> Call:
    """`call`, compiled for each shape when it is first seen (seconds to a minute each), in one piece or not at all."""
    compiled: Call = torch.compile(call, dynamic=False, fullgraph=True, backend=backend)

    def run(tokens: Tensor, positions: Tensor, layout: StaticLayout) -> Tensor:
        # A shape is a version of the same code.
        with torch.compiler.config.patch(recompile_limit=MOST_SHAPES):  # type: ignore[attr-defined]  # added at import
            return compiled(tokens, positions, layout)

    return run


def run_again(work: Callable[[], Tensor]) -> Replay:
    """In place of a recording, where there is no CUDA: the same padded pass, run anew."""
    return work
