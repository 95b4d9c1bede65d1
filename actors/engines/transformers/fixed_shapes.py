"""Passes of one fixed shape, so that a token's logits are the same to the last bit whatever else is computed.

A matrix library chooses the order of its sums by the shape of a product, by the place of a row in it and by the number
of threads, never by what the numbers are. So in a deterministic model each of these is a function of the token's own
position p (batch-invariant kernels reach the same by fixed tile sizes: He and Thinking Machines Lab, "Defeating
Nondeterminism in LLM Inference", 2025):

- The whole model, from the embedding to the head, runs over tiles [1, BLOCK]. The token at position p stands at place
  p mod BLOCK, whoever has the other places; those that nobody has hold filler.
- It attends within its aligned block of positions, as row p mod BLOCK of a problem [heads, BLOCK, CELLS * n] with
  n = p // CELLS + 1, whose mask is a function of the block as well.

Rows of a product do not mix, and a masked cell adds an exact zero; so what is at other places cannot be seen. What
blocks, neighbours and chunks change is the number of tiles, and with it time. Neither size was found by comparing
bits: they are a matter of speed alone (benchmarks/LOG.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from actors.engines.transformers.slots import SlotCache, SlotRow
from actors.errors import ConfigError

BLOCK = 8
"""Tokens of a tile, and positions that attend together."""
CELLS = 64
"""The cells that a block of positions attends to are a whole multiple of this, itself one of BLOCK."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one slot within one aligned block of positions.

    first: index of the first of them in the pass.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    first: int

    @property
    def place(self) -> int:
        """Of the first token, in the tile."""
        return self.start % BLOCK

    @property
    def base(self) -> int:
        """First position of the block."""
        return self.start - self.place


def tiles_of(rows: Sequence[SlotRow]) -> list[list[Segment]]:
    """Spread the tokens of a pass over tiles, which run one after the other; no place of a tile is taken twice.

    Each segment goes into the first tile that has its places free and comes after what the slot has before it.
    Raises ConfigError for tree nodes, whose place their position does not fix.
    """
    tiles: list[list[Segment]] = []
    taken: list[set[int]] = []
    last: dict[int, int] = {}
    for segment in _segments(rows):
        places = set(range(segment.place, segment.place + len(segment.tokens)))
        i = last.get(segment.slot, -1) + 1
        while i < len(tiles) and taken[i] & places:
            i += 1
        if i == len(tiles):
            tiles.append([])
            taken.append(set())
        tiles[i].append(segment)
        taken[i] |= places
        last[segment.slot] = i
    return tiles


def _segments(rows: Sequence[SlotRow]) -> list[Segment]:
    found: list[Segment] = []
    first = 0
    for row in rows:
        if row.paths:
            raise ConfigError("a deterministic model computes continuations of a prefix, no trees")
        done = 0
        while done < len(row.tokens):
            start = row.start + done
            count = min(BLOCK - start % BLOCK, len(row.tokens) - done)
            found.append(Segment(row.slot, row.tokens[done : done + count], start, first + done))
            done += count
        first += len(row.tokens)
    return found


class TileLayout:
    """Where the tokens of one tile go and what they see. Implements slots.Attending."""

    def __init__(self, cache: SlotCache, segments: Sequence[Segment]) -> None:
        self.cache = cache
        tokens, positions = [0] * BLOCK, list(range(BLOCK))
        places: list[int] = []
        written: list[tuple[int, int]] = []
        self._shares: list[_Share] = []
        for segment in segments:
            start, count = segment.start, len(segment.tokens)
            mine = slice(segment.place, segment.place + count)
            tokens[mine] = segment.tokens
            positions[mine] = range(start, start + count)
            places.extend(range(BLOCK)[mine])
            written.extend((segment.slot, position) for position in range(start, start + count))
            seen = (segment.base // CELLS + 1) * CELLS
            cache.claim(segment.slot, start + count, seen)
            self._shares.append(_Share(segment.slot, mine, seen, hidden_from(segment.base, seen)))
        self.tokens = torch.tensor([tokens])  # [1, BLOCK]
        self.positions = torch.tensor([positions])  # [1, BLOCK]
        self._places = torch.tensor(places)  # [tokens]
        self._slots, self._cells = torch.tensor(written).T  # [tokens] each
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """As slots.Layout.attend, T being BLOCK; places that nobody has get zeros."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self._slots, :, self._cells] = key[0, :, self._places].transpose(0, 1)
        values[self._slots, :, self._cells] = value[0, :, self._places].transpose(0, 1)
        heads, shared = query.shape[1], key.shape[1]
        fold = heads // shared
        out = query.new_zeros(BLOCK, heads, value.shape[-1])  # [T, H, D]
        folded = query.reshape(1, shared, fold * BLOCK, -1)  # query heads of a key head laid end to end
        for i, share in enumerate(self._shares):
            if (i, fold) not in self._masks:
                additive = torch.zeros(share.hidden.shape, dtype=query.dtype).masked_fill_(share.hidden, -torch.inf)
                self._masks[i, fold] = additive.repeat(fold, 1)[None, None]
            mixed = functional.scaled_dot_product_attention(
                folded,
                keys[share.slot : share.slot + 1, :, : share.seen],
                values[share.slot : share.slot + 1, :, : share.seen],
                attn_mask=self._masks[i, fold],  # given even where it hides nothing: without one another kernel runs
                scale=scaling,
            )
            out[share.places] = mixed.reshape(heads, BLOCK, -1)[:, share.places].transpose(0, 1)
        return out[None]


@dataclass(frozen=True, slots=True)
class _Share:
    """One slot's places in a tile, and the cells below `seen` that its block attends to. hidden: [BLOCK, seen]."""

    slot: int
    places: slice
    seen: int
    hidden: Tensor


def hidden_from(base: int, seen: int) -> Tensor:
    """bool [BLOCK, seen]: the cells that lie after each position of the block that begins at `base`."""
    return torch.arange(seen) > base + torch.arange(BLOCK)[:, None]


def require_fixed_shapes(module: Any, name: str, device: torch.device) -> None:
    """Raises ConfigError for what does not get the same bits from passes of fixed shapes."""
    config = module.config.get_text_config()
    reason = None
    if device.type != "cpu":
        reason = f"on {device.type} the order of sums is not fixed by shapes alone; it is promised on CPUs only"
    elif any((getattr(config, experts, None) or 0) > 1 for experts in _EXPERTS):
        reason = f"{name} is a mixture of experts: the rows that an expert multiplies depend on their neighbours"
    elif _rope_types(config) & _ROPE_OF_THE_PASS:
        reason = f"{name} rotates by angles that depend on the longest sequence in the pass"
    elif os.environ.get("OMP_DYNAMIC", "false").strip().lower() in ("true", "1"):
        reason = "OMP_DYNAMIC lets the number of threads, and with it the order of sums, follow the machine's load"
    if reason is not None:
        raise ConfigError(f"target.deterministic cannot be promised: {reason}", "target.deterministic")


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ROPE_OF_THE_PASS = {"dynamic", "longrope"}


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary embedding that a configuration names, for all layers or for each kind of layer."""
    found: set[str] = set()
    for settings in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(settings, dict):
            for part in (settings, *(value for value in settings.values() if isinstance(value, dict))):
                found |= {str(part[key]) for key in ("rope_type", "type") if key in part}
    return found
