"""Keys and values in preallocated slots, and attention of one flat pass over many of them.

A pass is one sequence of tokens [1, T] to the model's linear layers: the rows of all sequences end to end, without
padding. Only attention knows which token belongs to which slot. It is plugged in through transformers' public
AttentionInterface, so the model's own code runs unchanged; the pass's `Layout` travels as a keyword argument.

A slot holds `scratch` cells followed by `context` cells. The committed prefix lies in the context cells, position i in
cell scratch + i. Nodes of an outcome tree lie in scratch cells, in any order, because keys carry their position with
them; so a tree costs attention no more than its own cells, and moving a node into the prefix is a copy. Scratch lies
*before* the prefix so that what one sequence uses is one contiguous range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from actors.errors import ConfigError

ATTENTION = "outrider_slots"
"""The name under which `slot_attention` is registered with transformers."""

_BATCHED_LENGTH = 32
"""On an accelerator, sequences with at most this many tokens in the pass attend as one padded batch."""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """Tokens of one slot in a pass.

    Without `paths` they continue the prefix: token i takes position start + i and sees all before it.
    With `paths` they are tree nodes past a prefix of `start` tokens: node i sees the prefix and the cells paths[i], its
    ancestors' from the root on, the last of which is its own. They are scratch cells, or those that the prefix would
    take next: where a node is likely to be committed, it need not be copied then.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    paths: Sequence[Sequence[int]] = ()

    def positions(self) -> list[int]:
        """Absolute position of each token."""
        if self.paths:
            return [self.start + len(path) - 1 for path in self.paths]
        return list(range(self.start, self.start + len(self.tokens)))

    def end(self, scratch: int) -> int:
        """One past the last cell that its tokens write or see."""
        if self.paths:
            return max(scratch + self.start, 1 + max(path[-1] for path in self.paths))
        return scratch + self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Of one layer's keys and values, on this rank."""

    heads: int
    key_size: int
    value_size: int


class SlotCache:
    """Keys [slots, heads, scratch + context, key_size] and values, per layer; allocated once."""

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        *,
        slots: int,
        context: int,
        scratch: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots, self.context, self.scratch = slots, context, scratch
        self._written = [0] * slots
        cells = scratch + context
        self.keys = [torch.zeros(slots, s.heads, cells, s.key_size, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.zeros(slots, s.heads, cells, s.value_size, dtype=dtype, device=device) for s in shapes]

    @property
    def size_in_bytes(self) -> int:
        """Memory held, whatever is in use."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def claim(self, slot: int, end: int, seen: int) -> None:
        """A pass of fixed shape writes cells of `slot` below `end`, and reads those below `seen`, masked from `end` on.

        What an earlier pass left there is blanked: a mask hides numbers, but not infinities.
        """
        if end < seen and end < self._written[slot]:
            for layer in (*self.keys, *self.values):
                layer[slot, :, end:seen] = 0
        self._written[slot] = max(self._written[slot], end)

    def adopt(self, slot: int, cells: Sequence[int], position: int) -> None:
        """Copy the tree nodes in scratch `cells`, a path from the root, into the prefix from `position` on."""
        start = self.scratch + position
        source = torch.tensor(cells, device=self.keys[0].device)
        for layer in (*self.keys, *self.values):
            layer[slot, :, start : start + len(cells)] = layer[slot].index_select(1, source)

    def move(self, moves: Sequence[Move]) -> None:
        """Copy nodes of many slots' trees into their prefixes."""
        if not moves:
            return
        for move in moves:
            end = self.scratch + move.position + 1
            self.claim(move.slot, end, end)
        slots, sources, positions = torch.tensor(moves, device=self.keys[0].device).T  # [N] each
        targets = positions + self.scratch
        for layer in (*self.keys, *self.values):
            layer[slots, :, targets] = layer[slots, :, sources]  # [N, heads, size]


class Move(NamedTuple):
    """Of one tree node: from scratch `cell` of its slot to `position` of the prefix."""

    slot: int
    cell: int
    position: int


@dataclass(slots=True, eq=False)
class _Group:
    """One slot's share of a layout: tokens [first, last) of the pass, which see some of the cells [low, high).

    hidden: bool [tokens, cells], True where a token may not look; None if it sees all.
    """

    slot: int
    first: int
    last: int
    low: int
    high: int
    hidden: Tensor | None
    masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, fold: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Additive, [1, 1, fold * tokens, cells]; `fold` query heads share a key head and are laid end to end."""
        if self.hidden is None:
            return None
        if fold not in self.masks:
            additive = torch.zeros(self.hidden.shape, dtype=dtype).masked_fill_(self.hidden, -torch.inf)
            self.masks[fold] = additive.repeat(fold, 1)[None, None].to(device)
        return self.masks[fold]


class Layout:
    """Where the tokens of one pass go and what they see. Rows of one slot stand next to each other."""

    def __init__(self, cache: SlotCache, rows: Sequence[SlotRow]) -> None:
        self.cache = cache
        device = cache.keys[0].device
        self._groups = list(_grouped(rows, cache.scratch))
        positions = [position for row in rows for position in row.positions()]
        cells = [cell for row in rows for cell in cells_of(row, cache.scratch)]
        slots = [row.slot for row in rows for _ in row.tokens]
        self.tokens = torch.tensor([[token for row in rows for token in row.tokens]], device=device)  # [1, T]
        self.positions = torch.tensor([positions], device=device)  # [1, T]
        self._places = torch.tensor([slots, cells], device=device)  # [2, T]
        self._batches: _Batch | None = None
        short = [group for group in self._groups if group.last - group.first <= _BATCHED_LENGTH]
        if device.type != "cpu" and len(short) > 1:  # on a CPU the padding and copying cost more than calls do
            self.batch(short)

    def batch(self, groups: Sequence[_Group] | None = None) -> None:
        """Let these groups (all by default) attend as one padded batch."""
        self._batches = _Batch(list(groups or self._groups), self._places.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Store this pass's keys and values of a layer, and attend.

        query: [1, H, T, D]; key, value: [1, K, T, D] with K dividing H. Returns [1, T, H, D].
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        slots, cells = self._places
        keys[slots, :, cells] = key[0].transpose(0, 1)
        values[slots, :, cells] = value[0].transpose(0, 1)
        heads, shared = query.shape[1], key.shape[1]
        fold = heads // shared
        out = query.new_empty(query.shape[2], heads, value.shape[-1])  # [T, H, D]
        batched = self._batches
        if batched is not None:
            batched.attend(query[0], keys, values, out, scaling)
        for group in self._groups:
            if batched is not None and group in batched.groups:
                continue
            n = group.last - group.first
            folded = query[:, :, group.first : group.last].reshape(1, shared, fold * n, -1)
            seen = slice(group.low, group.high)
            mixed = functional.scaled_dot_product_attention(
                folded,
                keys[group.slot : group.slot + 1, :, seen],
                values[group.slot : group.slot + 1, :, seen],
                attn_mask=group.mask(fold, query.dtype, query.device),
                scale=scaling,
            )
            out[group.first : group.last] = mixed.reshape(heads, n, -1).transpose(0, 1)
        return out[None]


class _Batch:
    """Several groups that attend together, padded to the longest."""

    def __init__(self, groups: list[_Group], device: torch.device) -> None:
        self.groups = groups
        self.low, self.high = min(g.low for g in groups), max(g.high for g in groups)
        length = max(g.last - g.first for g in groups)
        hidden = torch.ones(len(groups), length, self.high - self.low, dtype=torch.bool)
        picks = torch.zeros(len(groups), length, dtype=torch.long)
        for i, group in enumerate(groups):
            n, seen = group.last - group.first, slice(group.low - self.low, group.high - self.low)
            hidden[i, :n, seen] = False if group.hidden is None else group.hidden
            hidden[i, n:, 0] = False  # padding looks at something, so that no row of the softmax is empty
            picks[i, :n] = torch.arange(group.first, group.last)
        self._hidden = hidden.to(device)
        self._picks = picks.to(device)
        self._real = torch.cat([torch.arange(g.last - g.first) + i * length for i, g in enumerate(groups)]).to(device)
        self._tokens = torch.cat([torch.arange(g.first, g.last) for g in groups]).to(device)
        self._slots = torch.tensor([g.slot for g in groups], device=device)
        self._masks: dict[int, Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, scaling: float | None) -> None:
        """query: [H, T, D]; fills this batch's tokens of out [T, H, D]."""
        heads, shared = query.shape[0], keys.shape[1]
        fold = heads // shared
        size, length = self._picks.shape
        if fold not in self._masks:
            additive = torch.zeros(self._hidden.shape, dtype=query.dtype, device=query.device)
            self._masks[fold] = additive.masked_fill_(self._hidden, -torch.inf).repeat(1, fold, 1)[:, None]
        padded = query[:, self._picks].transpose(0, 1).reshape(size, shared, fold * length, -1)
        mixed = functional.scaled_dot_product_attention(
            padded,
            keys[self._slots, :, self.low : self.high],
            values[self._slots, :, self.low : self.high],
            attn_mask=self._masks[fold],
            scale=scaling,
        )
        flat = mixed.view(size, heads, length, -1).transpose(1, 2).reshape(size * length, heads, -1)
        out[self._tokens] = flat[self._real]


class Attending(Protocol):
    """What attention asks of a layout."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor: ...


class Probe:
    """Stands in for a layout in a pass of one token that finds out how a model attends."""

    def __init__(self, context: int) -> None:
        self._context = context
        self.shapes: dict[int, HeadShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """A single token attends to itself."""
        self.shapes[layer] = HeadShape(key.shape[1], key.shape[-1], value.shape[-1])
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2)

    def check(self, options: dict[str, Any]) -> None:
        """Raises ConfigError for kinds of attention that slots do not give."""
        window = options.get("sliding_window")
        if window is not None and window < self._context:
            raise ConfigError(
                f"the model attends through a sliding window of {window} tokens, below the context of {self._context}; "
                "only full attention is supported: lower the context to the window, or use the vllm engine"
            )
        for name, meaning in _UNSUPPORTED.items():
            if options.get(name) is not None:
                raise ConfigError(f"the model uses {meaning}, which the transformers engine does not support")


_UNSUPPORTED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias in its attention",
}


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Attending | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' models call. Inputs as in Layout.attend; [1, T, H, D] out."""
    if layout is None:
        raise ConfigError("this model runs in slots: its passes need a layout")
    if isinstance(layout, Probe):
        layout.check(options)
    layer: Any = module.layer_idx
    return layout.attend(int(layer), query, key, value, scaling), None


def cells_of(row: SlotRow, scratch: int) -> list[int]:
    """The cell of each token of a row."""
    if row.paths:
        return [path[-1] for path in row.paths]
    return [scratch + position for position in row.positions()]


def _grouped(rows: Sequence[SlotRow], scratch: int) -> Iterator[_Group]:
    first = 0
    for slot, share in groupby(rows, key=lambda row: row.slot):
        mine = list(share)
        last = first + sum(len(row.tokens) for row in mine)
        low = min((min(path) for row in mine for path in row.paths), default=scratch)
        high = max(row.end(scratch) for row in mine)
        sees_all = last - first == 1 and not mine[0].paths and low == scratch
        yield _Group(slot, first, last, low, high, None if sees_all else hidden_cells(mine, scratch, low, high))
        first = last


def hidden_cells(rows: Sequence[SlotRow], scratch: int, low: int, high: int) -> Tensor:
    """bool [tokens, high - low]: what each token of one slot may not see."""
    limits = [row.start if row.paths else position + 1 for row in rows for position in row.positions()]
    cells = torch.arange(low - scratch, high - scratch)  # as positions of the prefix; scratch is negative
    hidden = (cells < 0) | (cells >= torch.tensor(limits)[:, None])
    places = [
        (i, cell - low)
        for i, path in enumerate(path for row in rows for path in (row.paths or [()] * len(row.tokens)))
        for cell in path
    ]
    if places:
        tokens, columns = torch.tensor(places).T
        hidden[tokens, columns] = False
    return hidden
