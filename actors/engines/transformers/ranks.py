"""Tensor parallelism of the transformers engine: one process per rank, in lock-step.

Weights are sharded by transformers' own plan (`tp_plan`), so every rank runs the same pass over its share of the
heads, with its share of the cache. Rank 0 is the one that is driven: before each pass it tells the others what the
pass is. What they compute beyond their share of its sums is thrown away.

A rank that dies ends the group: the next collective of every other rank fails, which is an EngineError at rank 0.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import Move, SlotCache, SlotRow
from actors.errors import EngineError

PATIENCE_S = 60.0
"""A rank that does not answer for this long is taken for dead (a rank whose process ends is noticed at once)."""
_Store: Any = distributed.TCPStore  # type: ignore[attr-defined]  # torch's own documentation names it there
_FOR_EVER = datetime.timedelta(days=1000)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one group meet, and how many they are."""

    host: str
    port: int
    size: int


@dataclass(frozen=True, slots=True)
class _MakeCache:
    slots: int
    context: int
    scratch: int


@dataclass(frozen=True, slots=True)
class _RunPass:
    rows: Sequence[SlotRow]
    keep: Sequence[int]


@dataclass(frozen=True, slots=True)
class _MoveNodes:
    moves: Sequence[Move]


class RankGroup:
    """This process's place in a group. A process belongs to at most one.

    Raises EngineError when the group does not come together within its patience.
    """

    def __init__(self, rank: int, meeting: Rendezvous, store: Any, patience_s: float) -> None:
        self.rank, self.size = rank, meeting.size
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        patience = datetime.timedelta(seconds=patience_s)
        try:
            distributed.init_process_group(backend, rank=rank, world_size=meeting.size, store=store, timeout=patience)
        except RuntimeError as error:
            raise EngineError(f"rank {rank} of {meeting.size} did not meet the others: {error}") from error
        # Between orders any time may pass; the end of rank 0 breaks the connection, and so the waiting.
        self._orders = distributed.new_group(backend="gloo", timeout=_FOR_EVER)

    @classmethod
    def lead(
        cls,
        host: str,
        size: int,
        invite: Callable[[Rendezvous], None],
        patience_s: float = PATIENCE_S,
    ) -> RankGroup:
        """Open the meeting place, invite the others, and be rank 0. invite: must not wait for them to come."""
        patience = datetime.timedelta(seconds=patience_s)
        store = _Store(host, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
        meeting = Rendezvous(host, store.port, size)
        invite(meeting)
        return cls(0, meeting, store, patience_s)

    @classmethod
    def join(cls, rank: int, meeting: Rendezvous, patience_s: float = PATIENCE_S) -> RankGroup:
        """Be one of the others."""
        patience = datetime.timedelta(seconds=patience_s)
        try:
            store = _Store(meeting.host, meeting.port, meeting.size, is_master=False, timeout=patience)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"rank {rank} does not reach {meeting.host}:{meeting.port}: {error}") from error
        return cls(rank, meeting, store, patience_s)

    def tell(self, order: object) -> None:
        """From rank 0 to all others."""
        self._broadcast([order])

    def hear(self) -> Any:
        """What rank 0 tells; waits for it as long as it takes. Raises EngineError when rank 0 is gone."""
        heard: list[Any] = [None]
        self._broadcast(heard)
        return heard[0]

    def leave(self) -> None:
        """End this process's part; the others' next collective fails."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _broadcast(self, items: list[Any]) -> None:
        try:
            distributed.broadcast_object_list(items, src=0, group=self._orders, device=torch.device("cpu"))
        except RuntimeError as error:
            raise EngineError(f"a rank of the tensor-parallel group is gone: {_first_line(error)}") from error


class LeadingLM(CausalLM):
    """Rank 0's model: what is asked of it, the other ranks do too."""

    def __init__(self, *args: Any, group: RankGroup, **options: Any) -> None:
        super().__init__(*args, **options)
        self._group = group

    def cache(self, *, slots: int, context: int, scratch: int = 0) -> SlotCache:
        """As CausalLM.cache, of this rank's heads; the other ranks make theirs."""
        self._group.tell(_MakeCache(slots, context, scratch))
        return super().cache(slots=slots, context=context, scratch=scratch)

    def run(self, cache: SlotCache, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        """As CausalLM.run. Raises EngineError when a rank is gone."""
        self._group.tell(_RunPass(rows, keep))
        try:
            return super().run(cache, rows, keep)
        except RuntimeError as error:
            raise EngineError(f"a rank of the tensor-parallel group failed in a pass: {_first_line(error)}") from error

    def move(self, cache: SlotCache, moves: Sequence[Move]) -> None:
        """As CausalLM.move."""
        if moves:
            self._group.tell(_MoveNodes(moves))
            super().move(cache, moves)

    def disband(self) -> None:
        """Tell the other ranks that there is nothing more to do."""
        self._group.tell(None)
        self._group.leave()


def follow(model: CausalLM, group: RankGroup) -> None:
    """Do what rank 0 does, until it disbands the group. Raises EngineError when rank 0 is gone."""
    cache: SlotCache | None = None
    while True:
        match group.hear():
            case _MakeCache(slots, context, scratch):
                cache = model.cache(slots=slots, context=context, scratch=scratch)
            case _RunPass(rows, keep):
                assert cache is not None  # rank 0 makes its own first
                model.run(cache, rows, keep)
            case _MoveNodes(moves):
                assert cache is not None
                model.move(cache, moves)
            case None:
                group.leave()
                return


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
