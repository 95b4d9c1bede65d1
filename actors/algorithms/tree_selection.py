"""Which named nodes of a sequence's tree are worth verifying, best first.

What a node adds to a pass is its reach, the chance that the target comes to it. No node has more reach than its parent,
so the nodes by reach are closed under parents wherever the list is cut, and the best set of n nodes is its first n.
Over many sequences the best set is what a merge of their lists takes (control/lookahead.py), a length for each.

Pure: knows no mailbox, costs or engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from actors.algorithms.draft_tree import is_path
from actors.engines.protocol import Proposal
from actors.messages import extend_key

LEAST_REACH = 2e-3
"""Nodes that the target comes to less often are left out: they cost bookkeeping whatever a token costs the device. The
first one is not, so that whoever chooses sees that there is a draft, and what it is worth."""

Branches = Sequence[tuple[float, int]]
"""The children of a node: chance given the node, and token; the most likely first."""


def rank_nodes(key: int, children: Callable[[int, int], Branches], *, most: int, depth: int) -> Proposal:
    """The best nodes below the committed prefix `key`: at most `most` of them, at most `depth` deep.

    children(length, key): what was named to follow the prefix `key`, `length` tokens past the committed one; () if
        nothing was.
    """
    tokens: list[int] = []
    confidences: list[float] = []
    parents: list[int] = []
    level: list[int] = []
    keys: list[int] = []
    # A node brings its first child and its next sibling, so that the heap holds two entries for each node taken.
    heap: list[tuple[float, int, int, Branches]] = []  # -reach, parent, rank, siblings

    def add(parent: int, rank: int, siblings: Branches, reach: float) -> None:
        if rank < len(siblings):
            value = reach * siblings[rank][0]
            if value >= LEAST_REACH or not tokens:
                heapq.heappush(heap, (-value, parent, rank, siblings))

    if most > 0 and depth > 0:
        add(-1, 0, children(0, key), 1.0)
    reach: list[float] = []
    while heap and len(tokens) < most:
        value, parent, rank, siblings = heapq.heappop(heap)
        confidence, token = siblings[rank]
        node = len(tokens)
        tokens.append(token)
        confidences.append(confidence)
        parents.append(parent)
        reach.append(-value)
        level.append(1 if parent < 0 else level[parent] + 1)
        keys.append(extend_key(key if parent < 0 else keys[parent], token))
        add(parent, rank + 1, siblings, 1.0 if parent < 0 else reach[parent])
        if level[node] < depth:
            add(node, 0, children(level[node], keys[node]), -value)
    return Proposal(tuple(tokens), tuple(confidences), (), () if is_path(parents) else tuple(parents))
