"""What an engine must do, for targets and for drafts. Engines know nothing of links, Ray or orchestrators.

An engine is driven by one thread (the *model thread* of its actor) and need not be thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from actors.algorithms.draft_tree import is_path
from actors.features import Features
from actors.messages import OpenSequence, Support, VerificationResult


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the other tier must know of a model to tell whether the two fit together.

    fingerprint: digest of the vocabulary (token strings by id, and the special ones), so that a permuted vocabulary
        of equal size is found at start-up; empty for engines that have no vocabulary of their own.
    """

    name: str
    vocabulary: int
    context: int
    slots: int
    eos: tuple[int, ...] = ()
    fingerprint: str = ""
    trees: bool = False
    """A target that verifies trees; others are given the best path."""
    features: str = ""
    """Of a target: what it fuses its hidden states with; of a draft: what it must be fed with. Empty for none."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A path or tree of draft tokens past a committed prefix, ready to be verified. Empty means plain decoding."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """Per token, given that those before it on its path are accepted."""
    supports: tuple[Support, ...] = ()
    """q at each token, for the probabilistic rules; empty for the others."""
    parents: tuple[int, ...] = ()
    """Of a tree: the index of each token's parent, -1 for the committed prefix (algorithms/draft_tree.py). A path has
    none. Nodes come by their chance to be reached, so that the first ones are the best."""

    def cut(self, length: int) -> Proposal:
        """Its first `length` tokens; a tree that is a path then becomes one."""
        if length >= len(self.tokens):
            return self
        parents = self.parents[:length]
        return Proposal(
            self.tokens[:length],
            self.confidences[:length],
            self.supports[:length],
            () if is_path(parents) else parents,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of one target pass.

    tokens: to be run through the model past what is cached: a chunk of the prompt, or the last committed token
        followed by the draft tokens, those of a tree in its own order.
    start: absolute position of tokens[0].
    proposal: the draft tokens at the end of `tokens`.
    decide: False while more of the prompt is to come (no token is chosen).
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    proposal: Proposal = Proposal()
    decide: bool = True


class TargetModel(Protocol):
    """A target that decides tokens for the rows of a pass. Scheduling is not its business.

    `attach` gives it a slot's request and `record` the tokens committed, which it needs for penalties and grammars.
    Rollback is by length: a later Row for the slot starts where the committed prefix ends, and what was cached past
    that is overwritten. Of a tree, `forward` leaves the accepted path where a path would have been.
    """

    def card(self) -> ModelCard: ...

    def attach(self, slot: int, opening: OpenSequence) -> None:
        """Take `opening` into `slot`. Raises RequestError when its settings cannot be honoured."""

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        """Run one pass. Returns one result per row (None where row.decide is False)."""

    def record(self, slot: int, tokens: Sequence[int]) -> None:
        """`tokens` were committed in `slot` (a stop may have cut a result short)."""

    def detach(self, slot: int) -> None:
        """Give the slot back."""


@dataclass(frozen=True, slots=True)
class Expand:
    """Ask a draft what may follow the committed prefix of `sequence` plus `path`."""

    sequence: str
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A draft's answer to an Expand: children with the raw confidence of each (not yet calibrated).

    The sampled child comes first. `path` is repeated because a draft may answer more than it was asked (a lookup
    returns a whole chain).
    """

    sequence: str
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    support: Support | None = None


class DraftModel(Protocol):
    """A draft that ranks what may follow each of many prefixes, as one batch.

    The prefix of an Expand is always present or one step past what was expanded before. `advance` moves the
    committed prefix; the branch that came true is kept, the rest forgotten.
    """

    def card(self) -> ModelCard: ...

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence. Raises OverloadedError when no slot is free."""

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """Rank the children of all requested nodes in one batch, prefilling what is not cached yet.

        A sequence whose prefill is not finished within this step (it is chunked) is left out of the answer. A node
        after which nothing can be proposed gets an answer without tokens, and is not asked for again.
        """

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed past the committed prefix."""

    def close(self, sequence: str) -> None:
        """Give the slot back. Unknown sequences are ignored."""


@runtime_checkable
class ReportsFacts(Protocol):
    """A draft that has figures of its own for `outrider status`."""

    def facts(self) -> dict[str, float]: ...


@runtime_checkable
class FeatureReader(Protocol):
    """A draft that can use the target's hidden states. Not part of DraftModel: most drafts have no use for them."""

    def read_features(self, sequence: str, features: Features) -> None:
        """Take what came with a commit, early, late, twice or not at all. Never raises for what it cannot use."""

    def feature_counts(self) -> dict[str, float]:
        """For people: messages with features that were read, and that were dropped because they were of no use."""
