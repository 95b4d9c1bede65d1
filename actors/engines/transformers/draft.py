"""The embedded draft: a transformers model that ranks what may follow many prefixes, in one pass.

Committed tokens lie in a slot's context cells, tree nodes in its scratch cells (see slots.py). Because a node's keys
carry its absolute position, a branch that comes true is copied into the prefix; nothing is computed twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from actors.algorithms.drafting import DraftRow, RankedRow, rank_children
from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import SlotRow
from actors.errors import OverloadedError, PromptError, PromptTooLongError
from actors.messages import OpenSequence, prefix_key
from actors.settings import DraftSettings, SamplingSettings


@dataclass(slots=True, eq=False)
class _Node:
    """A computed node of an outcome tree; the root stands for the committed prefix and has no cell."""

    cell: int = -1
    used: int = 0
    """The step that last went through this node."""
    children: dict[int, _Node] = field(default_factory=dict)

    def below(self) -> Iterator[_Node]:
        """All nodes under this one."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class _Session:
    """One sequence: its committed tokens, and the tree of what was computed past them."""

    def __init__(self, slot: int, opening: OpenSequence, scratch: int) -> None:
        self.slot, self.opening = slot, opening
        self.tokens = [*opening.prompt, *opening.committed]
        self.key = prefix_key(self.tokens)
        self.cached = 0
        """How many of `tokens` have their keys and values in the slot. While some lack them, the tree is empty."""
        self.stale: int | None = None
        """From here on they are to be computed again, because more is known of the target (see feature_draft.py)."""
        self.root = _Node()
        self._free = [-cell for cell in range(scratch)]  # highest cell first: nearest to the prefix
        heapq.heapify(self._free)

    @property
    def output(self) -> list[int]:
        """The committed answer."""
        return self.tokens[len(self.opening.prompt) :]

    def find(self, path: Sequence[int]) -> tuple[list[_Node], Sequence[int]]:
        """The computed nodes along `path`, and the tokens of it that are not computed."""
        node = self.root
        nodes: list[_Node] = []
        for i, token in enumerate(path):
            child = node.children.get(token)
            if child is None:
                return nodes, path[i:]
            nodes.append(child)
            node = child
        return nodes, ()

    def claim(self, cells: int, step: int) -> list[int] | None:
        """Take scratch cells. Leaves not used in this step make room, longest unused first; None if that fails."""
        while len(self._free) < cells:
            if not self._evict(step):
                return None
        return [-heapq.heappop(self._free) for _ in range(cells)]

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Commit `tokens`. Returns the scratch cells of those that are computed already, from the first on."""
        nodes, _ = self.find(tokens)
        cells = [node.cell for node in nodes]
        true_root = nodes[-1] if len(nodes) == len(tokens) else _Node()
        kept = {node.cell for node in true_root.below()}
        for node in self.root.below():
            if node.cell not in kept:
                heapq.heappush(self._free, -node.cell)
        self.root = _Node(children=true_root.children)
        self.key = prefix_key(tokens, self.key)
        self.tokens.extend(tokens)
        self.cached += len(cells)
        return cells

    def _evict(self, step: int) -> bool:
        leaves = [
            (child.used, token, parent)
            for parent in (self.root, *self.root.below())
            for token, child in parent.children.items()
            if not child.children and child.used != step
        ]
        if not leaves:
            return False
        _, token, parent = min(leaves, key=lambda leaf: leaf[0])
        heapq.heappush(self._free, -parent.children.pop(token).cell)
        return True


@dataclass(slots=True)
class _Plan:
    """A pass in the making: rows, and which of its tokens answer which request."""

    rows: list[SlotRow] = field(default_factory=list)
    answers: list[tuple[int, Expand, _Session]] = field(default_factory=list)
    ended: list[Expand] = field(default_factory=list)
    """Requests past the end of the context."""
    length: int = 0
    budget: int = 0
    """Committed tokens that may still be prefilled in this pass."""

    def add(self, row: SlotRow) -> int:
        """Append a row. Returns the index of its first token."""
        first = self.length
        self.rows.append(row)
        self.length += len(row.tokens)
        return first


class TransformersDraft:
    """Implements protocol.DraftModel.

    Scratch is sized by settings.tree.nodes, so a tree that keeps to its settings always fits; should one not, the
    longest unused leaves are dropped and computed again when they are needed.
    """

    def __init__(self, model: CausalLM, settings: DraftSettings) -> None:
        self._model, self._settings = model, settings
        self._scratch = settings.tree.nodes
        self._cache = model.cache(slots=settings.slots, context=settings.context, scratch=self._scratch)
        self._free = list(range(settings.slots - 1, -1, -1))
        self._sessions: dict[str, _Session] = {}
        self._step = 0

    @property
    def cache_bytes(self) -> int:
        """Memory held by keys and values, whatever is in use."""
        return self._cache.size_in_bytes

    def card(self) -> ModelCard:
        model, settings = self._model, self._settings
        return ModelCard(
            model.name, model.vocabulary_size, settings.context, settings.slots, model.eos, model.fingerprint
        )

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence. Raises OverloadedError when no slot is free, PromptError for a prompt that cannot fit."""
        self.close(opening.sequence)
        size, length = self._model.vocabulary_size, len(opening.prompt) + len(opening.committed)
        if not opening.prompt:
            raise PromptError("the prompt is empty")
        if length > self._settings.context:
            raise PromptTooLongError(f"{length} tokens do not fit the draft's context of {self._settings.context}")
        if not all(0 <= token < size for token in (*opening.prompt, *opening.committed)):
            raise PromptError(f"the prompt holds a token id outside the draft's vocabulary of {size}")
        if not self._free:
            raise OverloadedError(f"all {self._settings.slots} draft slots are taken")
        self._sessions[opening.sequence] = _Session(self._free.pop(), opening, self._scratch)

    def close(self, sequence: str) -> None:
        """Give the slot back. Unknown sequences are ignored."""
        session = self._sessions.pop(sequence, None)
        if session is not None:
            self._free.append(session.slot)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed past the committed prefix."""
        session = self._sessions[sequence]
        start = session.cached
        cells = session.advance(tokens)
        if cells:
            self._cache.adopt(session.slot, cells, start)

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """Rank the children of all requested nodes in one pass.

        Left out are sequences whose prefill is not finished within this pass, and nodes for which there is no scratch
        left. At the end of the context nothing can follow.
        """
        self._step += 1
        plan = _Plan(budget=self._settings.prefill_chunk)
        asked: dict[str, list[Expand]] = {}
        for request in requests:
            asked.setdefault(request.sequence, []).append(request)
        sessions = [self._sessions[name] for name in asked]
        # Short tails first: a long prompt takes what is left of the chunk and does not hold up the others.
        for name, session in sorted(zip(asked, sessions, strict=True), key=lambda s: len(s[1].tokens) - s[1].cached):
            self._plan(plan, session, asked[name])
        ended = [Ranked(request.sequence, request.path, (), ()) for request in plan.ended]
        if not plan.rows:
            return ended
        logits = self._model.run(self._cache, plan.rows, [index for index, _, _ in plan.answers])  # [answers, V']
        if not plan.answers:
            return ended
        ranked = rank_children(
            logits,
            [self._draft_row(session, request.path) for _, request, session in plan.answers],
            branching=self._settings.tree.branching,
            support=self._settings.support,
            rule=self._settings.rule,
            vocabulary=self._model.vocabulary,
        )
        return ended + [_ranked(request, row) for (_, request, _), row in zip(plan.answers, ranked, strict=True)]

    def _plan(self, plan: _Plan, session: _Session, requests: list[Expand]) -> None:
        length = len(session.tokens)
        if length > self._settings.context:
            plan.ended.extend(requests)
            return
        root = [request for request in requests if not request.path]
        # Logits are not kept, so a root that is cached already costs its last token once more.
        start = min(session.cached, length - 1) if root else session.cached
        if session.stale is not None:
            start = min(start, session.stale)
        end = min(length, start + plan.budget)
        if start < end:
            plan.add(SlotRow(session.slot, session.tokens[start:end], start))
            plan.budget -= end - start
            session.cached = max(session.cached, end)
            if session.stale is not None:
                session.stale = end if end < session.cached else None
            plan.answers.extend((plan.length - 1, request, session) for request in root if end == length)
        if session.cached < length:
            return
        self._plan_nodes(plan, session, sorted((r for r in requests if r.path), key=lambda r: len(r.path)))

    def _plan_nodes(self, plan: _Plan, session: _Session, requests: list[Expand]) -> None:
        """Add the tree nodes of one sequence as one row: what was asked for, and what it needs before it."""
        length = len(session.tokens)
        tokens: list[int] = []
        paths: list[list[int]] = []
        for request in requests:
            if length + len(request.path) > self._settings.context:
                plan.ended.append(request)
                continue
            nodes, missing = session.find(request.path)
            for node in nodes:
                node.used = self._step
            if not missing:  # computed before, but its logits were not kept: run it again in its own cell
                missing = request.path[-1:]
                nodes, again = nodes[:-1], [nodes[-1].cell]
            else:
                again = []
            cells = again or session.claim(len(missing), self._step)
            if cells is None:
                continue
            branch = [node.cell for node in nodes]
            parent = nodes[-1] if nodes else session.root
            for token, cell in zip(missing, cells, strict=True):
                branch = [*branch, cell]
                node = parent.children.setdefault(token, _Node(cell))
                node.used = self._step
                parent = node
                tokens.append(token)
                paths.append(branch)
            plan.answers.append((plan.length + len(tokens) - 1, request, session))
        if tokens:
            plan.add(SlotRow(session.slot, tokens, length, paths))

    def _draft_row(self, session: _Session, path: tuple[int, ...]) -> DraftRow:
        opening = session.opening
        needs_history = _needs_history(opening.sampling)
        return DraftRow(
            sampling=opening.sampling,
            seed=opening.seed,
            position=len(session.tokens) + len(path),
            prefix=prefix_key(path, session.key),
            prompt=opening.prompt,
            output=[*session.output, *path] if needs_history else None,
            generated=len(session.tokens) - len(opening.prompt) + len(path),
            eos=self._model.eos,
        )


def _needs_history(sampling: SamplingSettings) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.bad_words
    )


def _ranked(request: Expand, row: RankedRow) -> Ranked:
    return Ranked(request.sequence, request.path, row.tokens, row.confidences, row.support)
