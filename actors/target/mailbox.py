"""The mailbox: draft proposals waiting in the target's process until a pass asks for them.

It knows nothing of rounds. An expansion is filed under its position and the key of the prefix that it continues, so
what agrees with the committed tokens is found, and what does not is never asked for and falls out when its position
has passed. Late, repeated, reordered and stale offers need no handling of their own.

Two traps of the probabilistic rules are closed here: `path` follows the sampled child of each node, never one that was
chosen for its worth, and where it ends depends on which prefixes were expanded, never on the token at the cut. Under
the coupled rule nothing that is verified changes a token, so there `tree` takes alternatives as well.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from actors.algorithms.tree_selection import Branches, rank_nodes
from actors.engines.protocol import Proposal
from actors.messages import EMPTY_PREFIX, Expansion, ProposalBatch, Support, extend_key, prefix_key

NOTHING = Proposal()
_CERTAIN = 1 + 1e-6
"""Confidences may be this large by rounding."""
MOST_CHILDREN = 32
"""Of one node; no draft has reason to name more (see TreeSettings.branching)."""


class _Shelf:
    """One sequence's expansions: position -> key of the prefix before it -> expansion.

    The first expansion of a node stays, so that a path once walked stays true: it only grows at its end, and moves
    past what is committed. It is therefore kept, and asking for it again costs nothing.
    """

    __slots__ = (
        "_branches",
        "_confidences",
        "_keys",
        "_made",
        "_supports",
        "_tokens",
        "_tree",
        "_tree_limits",
        "key",
        "levels",
        "position",
        "size",
    )

    def __init__(self, key: int, position: int) -> None:
        self.key = key
        self.position = position
        self.levels: dict[int, dict[int, Expansion]] = {}
        self.size = 0
        self._tokens: list[int] = []
        self._confidences: list[float] = []
        self._supports: list[Support | None] = []
        self._keys: list[int] = []
        """Of the prefix after each token of the path."""
        self._made: Proposal | None = None
        """What `path` answered last, until the path grows or moves."""
        self._branches: dict[int, dict[int, Branches]] = {}
        """The children of expansions that trees went through, by position and key; the most likely first."""
        self._tree: Proposal | None = None
        """What `tree` answered last, until something is filed or committed."""
        self._tree_limits = (0, 0, 0.0)

    def path(self, limit: int) -> Proposal:
        """The sampled path past what is committed, at most `limit` tokens."""
        tokens = self._tokens
        while len(tokens) < limit:
            key = self._keys[-1] if tokens else self.key
            level = self.levels.get(self.position + len(tokens))
            expansion = level.get(key) if level is not None else None
            if expansion is None:
                break
            token = expansion.tokens[0]
            tokens.append(token)
            self._confidences.append(expansion.confidences[0])
            self._supports.append(expansion.support)
            self._keys.append(extend_key(key, token))
            self._made = None
        length = min(limit, len(tokens))
        if self._made is None or len(self._made.tokens) != length:
            self._made = self._proposal(length) if length > 0 else NOTHING
        return self._made

    def tree(self, most: int, depth: int, least: float) -> Proposal:
        """The best nodes past what is committed: at most `most` of them, at most `depth` deep."""
        if self._tree is None or self._tree_limits != (most, depth, least):
            self._tree = rank_nodes(self.key, self._children, most=most, depth=depth, least=least)
            self._tree_limits = (most, depth, least)
        return self._tree

    def _children(self, length: int, key: int) -> Branches:
        position = self.position + length
        level = self.levels.get(position)
        expansion = level.get(key) if level is not None else None
        if expansion is None:
            return ()
        sorted_ones = self._branches.setdefault(position, {})
        branches = sorted_ones.get(key)
        if branches is None:
            named = zip(expansion.confidences, expansion.tokens, strict=True)
            branches = sorted_ones[key] = sorted(named, key=lambda child: -child[0])
        return branches

    def file(self, expansion: Expansion) -> bool:
        """Keep `expansion`, unless its node is known already. Its position must not have passed."""
        level = self.levels.setdefault(expansion.position, {})
        if expansion.parent in level:
            # The first stays: under the probabilistic rules, choosing between two draws would bias the output.
            return False
        level[expansion.parent] = expansion
        self.size += 1
        self._tree = None
        return True

    def _proposal(self, length: int) -> Proposal:
        tokens, supports = self._tokens[:length], self._supports[:length]
        # A draft token that came without q was chosen deterministically: its q is one-hot.
        kept = (
            [q or Support((token,), (1.0,)) for q, token in zip(supports, tokens, strict=True)] if any(supports) else []
        )
        return Proposal(tuple(tokens), tuple(self._confidences[:length]), tuple(kept))

    def commit(self, tokens: Sequence[int]) -> bool:
        """Move past `tokens`, and drop what lies before. Returns False where others were named in their place."""
        agreed = 0
        for token, walked in zip(tokens, self._tokens, strict=False):
            if token != walked:
                break
            agreed += 1
        self.key = self._keys[agreed - 1] if agreed else self.key
        foreseen = True
        for n, token in enumerate(tokens[agreed:], agreed):
            named = self.levels.get(self.position + n, {}).get(self.key)
            foreseen = foreseen and (named is None or token in named.tokens)
            self.key = extend_key(self.key, token)
        if agreed == len(tokens):
            for kept in (self._tokens, self._confidences, self._supports, self._keys):
                del kept[:agreed]
            self._made = None
        else:
            self.forget_path()
        for _ in tokens:
            self.size -= len(self.levels.pop(self.position, ()))
            self._branches.pop(self.position, None)
            self.position += 1
        self._tree = None
        return foreseen

    def shed(self, capacity: int) -> None:
        """Drop the deepest expansions until at most `capacity` are left."""
        while self.size > capacity:
            deepest = max(self.levels)
            self.size -= len(self.levels.pop(deepest))
            self._branches.pop(deepest, None)
            self.forget_path()
        self._tree = None

    def forget_path(self) -> None:
        """It is walked afresh when it is asked for next."""
        for kept in (self._tokens, self._confidences, self._supports, self._keys):
            kept.clear()
        self._made = None


class Mailbox:
    """Thread-safe: offers come in on the event loop, paths are taken on the model thread.

    vocabulary: ids at or above it are refused, and so are confidences that are none, siblings that are the same, more
        of them than any draft should name, and positions past the context, so that a broken draft cannot crash the
        target.
    context: positions that a sequence may have.
    capacity: expansions kept per sequence; the deepest, least likely to be asked for, give way.
    """

    def __init__(self, vocabulary: int, capacity: int = 1024, context: int = 1 << 62) -> None:
        self._vocabulary = vocabulary
        self._context = context
        self._capacity = capacity
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()
        self.malformed = 0
        """Expansions that made no sense and were dropped."""

    def open(self, sequence: str, tokens: Sequence[int]) -> None:
        """Start taking offers for `sequence`, whose prompt and committed tokens are `tokens`."""
        with self._lock:
            self._shelves[sequence] = _Shelf(prefix_key(tokens, EMPTY_PREFIX), len(tokens))

    def offer(self, batch: ProposalBatch) -> list[str]:
        """File the batch. Returns the sequences for which something new came, in time or too late for its position.

        A draft that is too late is one that follows: it catches up as soon as a pass is held for it.
        """
        touched = []
        with self._lock:
            for sequence, expansions in batch.expansions.items():
                shelf = self._shelves.get(sequence)
                if shelf is not None and self._file(shelf, expansions):
                    touched.append(sequence)
        return touched

    def _file(self, shelf: _Shelf, expansions: list[Expansion]) -> bool:
        fresh = False
        for expansion in expansions:
            if not self._well_formed(expansion):
                self.malformed += 1
                continue
            if expansion.position < shelf.position:
                fresh = True
                continue
            fresh |= shelf.file(expansion)
        if shelf.size > self._capacity:
            shelf.shed(self._capacity)
        return fresh

    def _well_formed(self, expansion: Expansion) -> bool:
        tokens = expansion.tokens
        return (
            0 < len(tokens) <= MOST_CHILDREN
            and len(tokens) == len(expansion.confidences)
            and expansion.position < self._context
            and (len(tokens) == 1 or len(set(tokens)) == len(tokens))
            and all(0 <= token < self._vocabulary for token in tokens)
            and all(0 <= confidence <= _CERTAIN for confidence in expansion.confidences)  # False for NaN
        )

    def path(self, sequence: str, limit: int) -> Proposal:
        """The sampled path past what is committed now, at most `limit` tokens; empty if there is none."""
        with self._lock:
            shelf = self._shelves.get(sequence)
            return shelf.path(limit) if shelf is not None else NOTHING

    def tree(self, sequence: str, most: int, depth: int, least: float = 0.0) -> Proposal:
        """The best nodes past what is committed now, by reach: at most `most`, at most `depth` deep; maybe none. Those
        with a reach below `least` are left out.

        For rules under which no choice of nodes changes a token.
        """
        with self._lock:
            shelf = self._shelves.get(sequence)
            return shelf.tree(most, depth, least) if shelf is not None else NOTHING

    def commit(self, sequence: str, tokens: Sequence[int]) -> bool:
        """Move the committed prefix on; expansions before it are dropped.

        Returns False where the draft named what may follow, and this was not among it: what it drafts until it has
        heard of the commit is of no use.
        """
        with self._lock:
            shelf = self._shelves.get(sequence)
            return shelf.commit(tokens) if shelf is not None else True

    def close(self, sequence: str) -> None:
        """Forget the sequence; unknown ones are ignored."""
        with self._lock:
            self._shelves.pop(sequence, None)

    def __len__(self) -> int:
        """Expansions held, over all sequences."""
        with self._lock:
            return sum(shelf.size for shelf in self._shelves.values())
