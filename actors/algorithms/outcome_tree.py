"""Outcome trees: what a draft guesses past each committed prefix, and which guess to pursue next.

A node is a prefix; expanding it asks the draft model what may follow. Its *reach* is the probability that the
sequence comes to that prefix, the product of the calibrated confidences on the way. All trees of a replica grow
best-first by reach, as one batch per draft step, which puts in each step the continuations that the next target
passes are most likely to ask for, whatever the pass now running commits. (Compare the outcome cache of Kumar, Dao and
May, "Speculative speculative decoding", ICLR 2026, which fixes its fan-out beforehand.)

Pure bookkeeping: knows no models, clocks, links or KV slots. Candidates cost a heap entry, not a node; a commit
touches only the nodes it keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Literal

from actors.algorithms.calibration import Calibration
from actors.algorithms.control.cost import PassCost
from actors.engines.protocol import Expand, Ranked
from actors.messages import Expansion, Support, extend_key, prefix_key
from actors.settings import TreeSettings

Progress = int | Literal["behind", "unknown"]

IDLE_WEIGHT = 0.02
"""A sequence that asks for nothing still has its root expanded now and then: a draft that stopped following would
come back with a gap."""

QUIET_AFTER = 64
"""Commits in a row that asked for nothing, of whatever sequences, after which speculation is taken to be turned off."""

QUIET_ROUNDS = 16
"""From then on, sequences are kept up with in one of so many rounds of commits. Catching up on many tokens at once
takes a draft little more than on one, so its device is nearly idle; and because all are kept up with in the same
round, the target has drafts of all of them at once to find out whether speculation pays again."""


class _Node:
    """A prefix that was handed out (no tokens yet) or expanded. Ranks index tokens, raw and chances.

    Nodes know their path but not their parent: without cycles, what a commit frees is gone at once.
    """

    __slots__ = ("chances", "children", "drawn", "epoch", "key", "path", "raw", "reach", "tokens")

    def __init__(self, path: tuple[int, ...], reach: float, key: int, epoch: int) -> None:
        self.path = path
        """Tokens from the root to here."""
        self.reach = reach
        self.key = key
        self.epoch = epoch
        self.tokens: tuple[int, ...] = ()
        self.raw: tuple[float, ...] = ()
        self.chances: list[float] = []
        self.drawn = False
        """The first child was drawn from a q that is sent along."""
        self.children: dict[int, _Node] = {}


_Candidate = tuple[float, int, _Node, int]
"""(-reach, ticket, parent, rank); rank -1 stands for the root itself."""


class OutcomeTree:
    """The tree of one sequence, rooted at its committed prefix. Bounded by `settings.nodes` and `settings.depth`."""

    __slots__ = ("_calibration", "_candidates", "_settings", "_ticket", "epoch", "position", "root", "size", "weight")

    def __init__(self, key: int, position: int, settings: TreeSettings, calibration: Calibration) -> None:
        self._settings = settings
        self._calibration = calibration
        self._ticket = 0
        self.weight = 1.0
        self.epoch = 0
        """Nodes of an older epoch were freed by a commit."""
        self._restart(key, position)

    def _restart(self, key: int, position: int) -> None:
        self.position = position
        """Length of the committed prefix."""
        self.root = _Node((), 1.0, key, self.epoch)
        self.size = 0
        """Nodes held, handed out or expanded."""
        self._candidates: list[_Candidate] = [(-1.0, 0, self.root, -1)]

    # -- growing -------------------------------------------------------------------------------------------------

    def best(self) -> float:
        """Reach of the best candidate; 0 if there is none."""
        candidates = self._candidates
        while candidates:
            value, _, parent, rank = candidates[0]
            if rank not in parent.children:
                return -value
            heapq.heappop(candidates)  # an answer that went past what was asked has expanded it
        return 0.0

    def take(self) -> tuple[_Node, _Node]:
        """Hand out the best candidate, after its parent. There must be one (see `best`)."""
        reach, _, parent, rank = heapq.heappop(self._candidates)
        if rank < 0:
            self.size += 1
            return parent, parent
        return parent, self._adopt(parent, rank, -reach)

    def _adopt(self, parent: _Node, rank: int, reach: float) -> _Node:
        token = parent.tokens[rank]
        node = parent.children[rank] = _Node((*parent.path, token), reach, extend_key(parent.key, token), self.epoch)
        self.size += 1
        return node

    def give_back(self, parent: _Node, node: _Node) -> None:
        """A node that was handed out got no answer. The root is asked for again, others not before a commit."""
        if node.epoch != self.epoch or node.tokens:
            return
        self.size -= 1
        if node is self.root:
            heapq.heappush(self._candidates, (-1.0, 0, node, -1))
        else:
            del parent.children[parent.tokens.index(node.path[-1])]

    def expand(self, node: _Node, answer: Ranked) -> Expansion | None:
        """Record the children of `node`. None when the node was freed, is expanded already, or has no children."""
        kept = self._settings.branching
        if node.epoch != self.epoch or node.tokens or not answer.tokens:
            return None
        node.tokens = answer.tokens[:kept]
        node.raw = answer.confidences[:kept]
        node.chances = self._calibration.probabilities(node.raw)
        node.drawn = answer.support is not None
        self._add_candidates(node, heapq.heappush)
        return self._expansion(node, answer.support)

    def _expansion(self, node: _Node, support: Support | None) -> Expansion:
        """What is said of a node: the first child, and alternatives that are likely enough to be verified with it.

        Where a child is drawn, a pass follows that one; the alternatives matter here alone, until one is committed.
        """
        count = 1
        if support is None:
            least = self._settings.min_reach
            while count < len(node.chances) and node.chances[count] >= least:
                count += 1
        position = self.position + len(node.path)
        return Expansion(node.key, position, node.tokens[:count], tuple(node.chances[:count]), support)

    def _add_candidates(self, node: _Node, add: Callable[[list[_Candidate], _Candidate], None]) -> None:
        if len(node.path) + 1 >= self._settings.depth:
            return
        least, reach, children = self._settings.min_reach, node.reach, node.children
        for rank, chance in enumerate(self._odds(node)):
            value = reach * chance
            if value >= least and rank not in children:
                self._ticket += 1
                add(self._candidates, (-value, self._ticket, node, rank))

    def _odds(self, node: _Node) -> list[float]:
        """What counts for the children's reach.

        Where tokens are drawn, trees grow by what the committed prefix fixes: the confidences at the root, and below it
        the ranks alone. Confidences below tell what was drawn above them, and a tree that grew by them would take its
        neighbours' width by it, and so tell the target's choice of k (see draft_path.py). Once they are committed, they
        count.
        """
        return self._calibration.shares(len(node.tokens)) if node.drawn and node is not self.root else node.chances

    def descend(self, node: _Node, tokens: Sequence[int]) -> _Node | None:
        """The node `tokens` past `node`, the last of which may be new. None if there is no such, or no room."""
        for i, token in enumerate(tokens):
            if node.epoch != self.epoch or token not in node.tokens:
                return None
            rank = node.tokens.index(token)
            child = node.children.get(rank)
            if child is None:
                room = self.size < self._settings.nodes and len(node.path) + 1 < self._settings.depth
                if i < len(tokens) - 1 or not room:
                    return None
                child = self._adopt(node, rank, node.reach * self._odds(node)[rank])
            node = child
        return node

    # -- committing ----------------------------------------------------------------------------------------------

    def commit(self, tokens: Sequence[int]) -> bool:
        """Move the root along `tokens`, learning on the way. True if the new root was in the tree."""
        node: _Node | None = self.root
        for token in tokens:
            if node is None or not node.tokens:
                node = None
                break
            rank = node.tokens.index(token) if token in node.tokens else None
            self._calibration.observe(node.raw, rank)
            node = None if rank is None else node.children.get(rank)
        self.epoch += 1
        position = self.position + len(tokens)
        if node is None:
            self._restart(prefix_key(tokens, self.root.key), position)
            return False
        self.position = position
        self._keep(node)
        return True

    def _keep(self, root: _Node) -> None:
        """Make `root` the root: what is below it stays, with reach renormalised, the rest is freed."""
        self.root = root
        shift = len(root.path)
        root.reach = 1.0
        self.size = 0
        self._candidates = []
        stack = [root]
        while stack:
            node = stack.pop()
            node.epoch = self.epoch
            node.path = node.path[shift:]
            self.size += 1
            self._add_candidates(node, list.append)
            odds = self._odds(node) if node.children else ()
            for rank, child in node.children.items():
                child.reach = node.reach * odds[rank]
                stack.append(child)
        heapq.heapify(self._candidates)

    def expanded(self) -> dict[tuple[int, ...], float]:
        """Reach of every expanded node, by path; for tests and inspection."""
        found: dict[tuple[int, ...], float] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.tokens:
                found[node.path] = node.reach
            stack.extend(node.children.values())
        return found


class Forest:
    """The trees of all sequences of a draft replica. Used from one thread, one draft step in flight at a time:
    `frontier`, then `grow` with what came of it; commits and closes may fall between the two.

    total: most nodes held over all sequences; sequences share it evenly when they are many.
    """

    def __init__(self, settings: TreeSettings, total: int = 16384, calibration: Calibration | None = None) -> None:
        self.calibration = calibration or Calibration()
        self._settings = settings
        self._total = total
        self._cost = PassCost()
        self._trees: dict[str, OutcomeTree] = {}
        self._asked: dict[tuple[str, tuple[int, ...]], tuple[OutcomeTree, _Node, _Node]] = {}
        self._unwanted = 0
        """Commits in a row that asked for nothing."""

    def open(self, sequence: str, key: int, position: int) -> None:
        """Start a tree at the committed prefix `key` of length `position`, in place of any former one."""
        self.close(sequence)
        self._trees[sequence] = OutcomeTree(key, position, self._settings, self.calibration)

    def close(self, sequence: str) -> None:
        """Free the tree; unknown sequences are ignored."""
        tree = self._trees.pop(sequence, None)
        if tree is not None:
            tree.epoch += 1

    def set_weight(self, sequence: str, weight: float) -> None:
        """After a commit: how much one reached node of this sequence is worth to the others' (default 1).

        Up to IDLE_WEIGHT nothing is asked for; see QUIET_AFTER.
        """
        tree = self._trees.get(sequence)
        if tree is not None:
            self._unwanted = self._unwanted + 1 if weight <= IDLE_WEIGHT else 0
            tree.weight = max(weight, IDLE_WEIGHT)

    @property
    def quiet(self) -> bool:
        """Is nothing to be expanded for sequences that ask for nothing, before the next commits?"""
        rounds = (self._unwanted - QUIET_AFTER) // max(1, len(self._trees))
        return self._unwanted >= QUIET_AFTER and rounds % QUIET_ROUNDS != QUIET_ROUNDS - 1

    def frontier(self, limit: int) -> list[Expand]:
        """At most `limit` nodes to expand next, most likely to be reached first, over all sequences.

        Fewer when rows make a step slower (see `observe_step`): a node is added as long as it brings more reach per
        second than the step has without it.
        """
        trees = self._trees
        share = min(self._settings.nodes, max(1, self._total // max(1, len(trees))))
        limit = min(limit, self._total - sum(tree.size for tree in trees.values()))
        least, quiet = self._settings.min_reach, self.quiet
        heads = [
            (-best * tree.weight, i, name, tree)
            for i, (name, tree) in enumerate(trees.items())
            if tree.size < share
            and (best := tree.best()) > 0.0
            and best * tree.weight >= least
            and not (quiet and tree.weight <= IDLE_WEIGHT)
        ]
        heapq.heapify(heads)
        found: list[Expand] = []
        gained, seconds, slope = 0.0, self._cost(1), self._cost.slope
        while heads and len(found) < limit:
            value, i, name, tree = heads[0]
            if found:
                seconds += slope
                if -value * seconds < (gained - value) * slope:
                    break
            gained -= value
            parent, node = tree.take()
            self._asked[name, node.path] = tree, parent, node
            found.append(Expand(name, node.path))
            value = tree.best() * tree.weight
            if value > 0.0 and value >= least and tree.size < share:
                heapq.heapreplace(heads, (-value, i, name, tree))
            else:
                heapq.heappop(heads)
        return found

    def grow(self, answers: Sequence[Ranked]) -> dict[str, list[Expansion]]:
        """Record a draft step's answers. Returns what to send, by sequence.

        Answers may go past what was asked, as a chain below it, each node after its parent. Answers to nodes that a
        commit has freed meanwhile are dropped; nodes without an answer are handed out again. An answer without tokens
        says that nothing can be proposed there: the node is not asked for again before a commit.
        """
        grown: dict[str, list[Expansion]] = {}
        for answer in answers:
            place = self._locate(answer.sequence, answer.path)
            if place is None:
                continue
            tree, node = place
            if not answer.tokens:  # nothing follows; the same prefix would get the same answer again
                self._asked.pop((answer.sequence, answer.path), None)
                continue
            expansion = tree.expand(node, answer)
            if expansion is not None:
                grown.setdefault(answer.sequence, []).append(expansion)
        for tree, parent, node in self._asked.values():
            tree.give_back(parent, node)
        self._asked.clear()
        return grown

    def observe_step(self, rows: int, seconds: float) -> None:
        """A draft step over `rows` nodes took `seconds`, by which the width of the next ones is chosen."""
        if rows > 0 and seconds > 0:
            self._cost.observe(rows, seconds)

    def _locate(self, sequence: str, path: tuple[int, ...]) -> tuple[OutcomeTree, _Node] | None:
        """The node at `path`, which counts from the root that the asked node had when it was handed out."""
        asked = self._asked.get((sequence, path))
        if asked is not None:
            return asked[0], asked[2]
        for cut in range(len(path) - 1, -1, -1):
            asked = self._asked.get((sequence, path[:cut]))
            if asked is not None:
                tree, _, node = asked
                below = tree.descend(node, path[cut:])
                return None if below is None else (tree, below)
        return None

    def commit(self, sequence: str, position: int, tokens: Sequence[int]) -> Progress:
        """Take committed `tokens` from absolute `position` on; what is known already is skipped.

        Returns how many, at their end, were new. 'behind': they start past the committed prefix, the tree stays as it
        is. 'unknown': no such sequence.
        """
        tree = self._trees.get(sequence)
        if tree is None:
            return "unknown"
        if position > tree.position:
            return "behind"
        fresh = tokens[tree.position - position :]
        if fresh:
            tree.commit(fresh)
        return len(fresh)

    def tree(self, sequence: str) -> OutcomeTree:
        """The tree of one sequence. Raises KeyError for an unknown one."""
        return self._trees[sequence]

    def position(self, sequence: str) -> int:
        """Length of the committed prefix. Raises KeyError for an unknown sequence."""
        return self._trees[sequence].position

    def size(self, sequence: str | None = None) -> int:
        """Nodes held, of one sequence or of all."""
        if sequence is not None:
            return self._trees[sequence].size
        return sum(tree.size for tree in self._trees.values())
