"""A draft without a model that remembers: what followed the last tokens in this request, or in the tenant's past.

One answer is a whole tree, since looking costs nothing (Oliaro et al., "SuffixDecoding", arXiv 2411.04975). Its memory
is told of commits alone, so it holds nothing but what a target said and what stood at the end of a prompt.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from actors.engines.lookup.suffix_memory import DEPTH, SuffixMemory, SuffixTreeDraft
from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.errors import OverloadedError
from actors.messages import OpenSequence, Support
from actors.settings import DraftSettings

logger = logging.getLogger(__name__)

_ROUNDING = 1e-5
"""How far the library's probabilities, products in single precision, may be above what they should be."""


class SuffixDraft:
    """Implements protocol.DraftModel. Knows no vocabulary, so it fits every target."""

    def __init__(self, settings: DraftSettings, memory: SuffixMemory) -> None:
        self._settings, self._memory = settings, memory
        self._recent: dict[str, list[int]] = {}
        """The last committed tokens of each sequence, as many as a context may have."""
        self.broken = 0
        """Trees of the library that made no sense and were dropped."""

    def card(self) -> ModelCard:
        return ModelCard("suffix", 0, self._settings.context, self._settings.slots)

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence. Raises OverloadedError when settings.slots sequences are held."""
        self.close(opening.sequence)
        if len(self._recent) >= self._settings.slots:
            raise OverloadedError(f"all {self._settings.slots} draft slots are taken")
        self._memory.open(opening.sequence, opening.tenant, opening.prompt, opening.committed)
        self._recent[opening.sequence] = [*opening.prompt, *opening.committed][-DEPTH:]

    def close(self, sequence: str) -> None:
        """Forget a sequence, not its answer. Unknown ones are ignored."""
        if self._recent.pop(sequence, None) is not None:
            self._memory.close(sequence)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed past the committed prefix."""
        self._memory.extend(sequence, tokens)
        self._recent[sequence] = [*self._recent[sequence], *tokens][-DEPTH:]

    def facts(self) -> dict[str, float]:
        """What `outrider status` shows of the memory."""
        memory = self._memory
        return {
            "memory_tokens": float(memory.tokens),
            "memory_answers": float(memory.answers),
            "broken_trees": float(self.broken),
        }

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """A tree per request, each node after its parent; an answer without tokens where nothing matches."""
        return [answer for request in requests for answer in self._expand(request)]

    def _expand(self, request: Expand) -> list[Ranked]:
        tree = self._settings.tree
        context = [*self._recent[request.sequence], *request.path]
        found = self._memory.look_up(request.sequence, context, tree.nodes)
        depth = max(1, tree.depth - len(request.path))
        certain = self._settings.rule in ("rejection", "block")
        try:
            answers = ranked(request, found, branching=tree.branching, depth=depth, certain=certain)
        except ValueError as error:
            self.broken += 1
            logger.warning("a tree of the suffix memory is dropped: %s", error)
            answers = []
        return answers or [Ranked(request.sequence, request.path, (), ())]


def ranked(request: Expand, found: SuffixTreeDraft, *, branching: int, depth: int, certain: bool) -> list[Ranked]:
    """The library's tree as answers past `request.path`, best children first and each node after its parent.

    A child's confidence is its share of what followed its parent, times m / (m + 1) where m tokens had matched by then,
    as for prompt lookup: a continuation that was seen once has all of the share, however short the match.

    branching: most children of a node. depth: most tokens past the path. certain: send q, which is one on the first
    child, for the probabilistic rules. Raises ValueError for a tree that is none.
    """
    _check(found)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(found.parents):
        children.setdefault(parent, []).append(node)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    answers: list[Ranked] = []
    for node in range(-1, len(found.parents)):
        path = paths.get(node)
        if path is None or node not in children or len(path) >= depth:
            continue
        best = sorted(children[node], key=lambda child: -found.probs[child])[:branching]
        tokens = tuple(found.token_ids[child] for child in best)
        paths |= {child: (*path, found.token_ids[child]) for child in best}
        whole = found.probs[node] if node >= 0 else 1.0
        matched = found.match_len + len(path)
        trust = matched / (matched + 1)
        answers.append(
            Ranked(
                request.sequence,
                (*request.path, *path),
                tokens,
                tuple(min(1.0, found.probs[child] / whole) * trust for child in best),
                Support(tokens[:1], (1.0,)) if certain else None,
            )
        )
    return answers


def _check(found: SuffixTreeDraft) -> None:
    """Raises ValueError unless parents come first, siblings differ, and probabilities fall from parent to child."""
    if not len(found.token_ids) == len(found.parents) == len(found.probs):
        raise ValueError("its tokens, parents and probabilities are not equally many")
    if found.token_ids and found.match_len < 1:
        raise ValueError("it continues a match of no tokens")
    edges: set[tuple[int, int]] = set()
    for node, (token, parent, chance) in enumerate(zip(found.token_ids, found.parents, found.probs, strict=True)):
        if not -1 <= parent < node:
            raise ValueError(f"token {node} has the parent {parent}")
        whole = found.probs[parent] if parent >= 0 else 1.0
        if not (math.isfinite(chance) and 0.0 < chance <= whole + _ROUNDING):
            raise ValueError(f"token {node} has the probability {chance}, its parent {whole}")
        if token < 0 or (parent, token) in edges:
            raise ValueError(f"token {node}, the id {token}, is negative or stands there twice")
        edges.add((parent, token))
