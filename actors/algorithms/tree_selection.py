"""Which named nodes of a sequence's tree are worth verifying, best first.

What a node adds to a pass is its reach, the chance that the target comes to it. No node has more reach than its parent,
so the nodes by reach are closed under parents wherever the list is cut, and the best set of n nodes is its first n.
Over many sequences the best set is what a merge of their lists takes (control/lookahead.py), a length for each.

Pure: knows no mailbox, costs or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from actors.engines.protocol import Proposal
from actors.messages import extend_key

LEAST_REACH = 2e-3
"""Nodes that the target comes to less often are left out: they cost bookkeeping whatever a token costs the device. The
first one is not, so that whoever chooses sees that there is a draft, and what it is worth."""

NOTHING = Proposal()

Branches = Sequence[tuple[float, int]]
"""The children of a node: chance given the node, and token; the most likely first."""


def rank_nodes(
    key: int, children: Callable[[int, int], Branches], *, most: int, depth: int, least: float = 0.0
) -> Proposal:
    """The best nodes below the committed prefix `key`: at most `most` of them, at most `depth` deep.

    children(length, key): what was named to follow the prefix `key`, `length` tokens past the committed one; () if
        nothing was.
    least: nodes with less reach are left out, but for the first.
    """
    first = children(0, key) if most > 0 and depth > 0 else ()
    if not first:
        return NOTHING
    least = max(least, LEAST_REACH)
    tokens: list[int] = []
    confidences: list[float] = []
    parents: list[int] = []
    # A node brings its first child and its next sibling, so that the heap holds two entries for each node taken:
    # -reach, parent, rank among the siblings, siblings, reach and key of the parent, depth.
    heap: list[tuple[float, int, int, Branches, float, int, int]] = [(-first[0][0], -1, 0, first, 1.0, key, 1)]
    path = True
    while heap and len(tokens) < most:
        value, parent, rank, siblings, above, above_key, level = heappop(heap)
        node = len(tokens)
        confidence, token = siblings[rank]
        tokens.append(token)
        confidences.append(confidence)
        parents.append(parent)
        path = path and parent == node - 1
        rank += 1
        if rank < len(siblings) and (reach := above * siblings[rank][0]) >= least:
            heappush(heap, (-reach, parent, rank, siblings, above, above_key, level))
        if level < depth:
            node_key = extend_key(above_key, token)
            below = children(level, node_key)
            if below and (reach := -value * below[0][0]) >= least:
                heappush(heap, (-reach, node, 0, below, -value, node_key, level + 1))
    return Proposal(tuple(tokens), tuple(confidences), (), () if path else tuple(parents))
