"""What waits for a slow reader, in order and bounded.

Offers may be dropped, results and commits may not: of offers, at most the newest of each sequence wait once there are
many; when too much of the rest waits, the reader is as good as gone, and whoever fills the backlog ends its link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar, cast

from actors.messages import ProposalBatch

T = TypeVar("T")

MOST_OFFERS = 64
"""Messages with offers that wait as they are; beyond, they are thinned to one."""


class Backlog(Generic[T]):
    """Items for one reader. Used from one event loop.

    most: items that may wait, offers left out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: list[T] = []
        self._offers = 0

    def put(self, item: T) -> bool:
        """Add an item. False where too much waits: the item was not added, and the reader's link should end."""
        if isinstance(item, ProposalBatch):
            if self._offers >= MOST_OFFERS:
                self._thin()
            self._offers += 1
        elif len(self._items) - self._offers >= self._most:
            return False
        self._items.append(item)
        return True

    def take(self) -> list[T]:
        """All that waits."""
        items, self._items, self._offers = self._items, [], 0
        return items

    def __len__(self) -> int:
        return len(self._items)

    def _thin(self) -> None:
        """All offers become one, after everything else that waits: they are of use only to sequences that are open."""
        offers = [item for item in self._items if isinstance(item, ProposalBatch)]
        self._items = [item for item in self._items if not isinstance(item, ProposalBatch)]
        self._items.append(cast(T, newest(offers)))
        self._offers = 1


def newest(offers: Sequence[ProposalBatch]) -> ProposalBatch:
    """One message for several of one source: the newest proposals of each sequence, and all else that they say."""
    expansions, behind = dict(offers[0].expansions), dict(offers[0].behind)
    for offer in offers[1:]:
        expansions.update(offer.expansions)
        behind.update(offer.behind)
    unknown = dict.fromkeys(name for offer in offers for name in offer.unknown)
    refused = dict.fromkeys(name for offer in offers for name in offer.refused)
    return replace(offers[-1], expansions=expansions, behind=behind, unknown=tuple(unknown), refused=tuple(refused))
