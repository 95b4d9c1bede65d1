"""The embedded target: a transformers model that verifies the rows of a pass in slots.

Scheduling is not its business, and neither are links: see protocol.TargetModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actors.algorithms.draft_tree import follow, main_path
from actors.algorithms.grammar import GrammarMatcher
from actors.algorithms.types import Block
from actors.algorithms.verification import verify_blocks
from actors.engines.opening_checks import check_opening
from actors.engines.protocol import ModelCard, Row
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.features import FeatureTap
from actors.engines.transformers.slots import Move, SlotRow
from actors.errors import InvalidSettingError
from actors.messages import OpenSequence, VerificationResult
from actors.settings import TargetSettings


class GrammarSource(Protocol):
    """Reads grammars for the model's vocabulary (algorithms.grammar.GrammarCompiler)."""

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of an answer. Raises InvalidSettingError if nothing can satisfy the grammar."""


@dataclass(slots=True)
class _Request:
    """What a slot's decisions depend on."""

    opening: OpenSequence
    grammar: GrammarMatcher | None
    output: list[int] = field(default_factory=list)


class TransformersTarget:
    """Implements protocol.TargetModel.

    One KV slot per running sequence is allocated up front: settings.slots times settings.context positions.
    """

    def __init__(
        self,
        model: CausalLM,
        settings: TargetSettings,
        grammars: GrammarSource | None = None,
        *,
        trees: bool = True,
        features: FeatureTap | None = None,
    ) -> None:
        """trees: verify trees of drafts; without, the best path of each. features: sent with each result."""
        self._model, self._settings, self._grammars, self._features = model, settings, grammars, features
        self._scratch = settings.lookahead.tree if trees else 0
        self._cache = model.cache(slots=settings.slots, context=settings.context, scratch=self._scratch)
        self._requests: dict[int, _Request] = {}

    @property
    def cache_bytes(self) -> int:
        """Memory held by keys and values, whatever is in use."""
        return self._cache.size_in_bytes

    def card(self) -> ModelCard:
        model = self._model
        return ModelCard(
            model.name,
            model.vocabulary_size,
            self._settings.context,
            self._settings.slots,
            model.eos,
            model.fingerprint,
            trees=self._scratch > 0,
            features="" if self._features is None else self._features.model,
        )

    def attach(self, slot: int, opening: OpenSequence) -> None:
        """Take `opening` into `slot`. Raises PromptError, or InvalidSettingError for ids that the model lacks."""
        check_opening(opening, self._model.vocabulary_size)
        if self._features is not None:
            self._features.forget(slot)
        request = _Request(opening, self._read_grammar(opening))
        self._requests[slot] = request
        if opening.committed:
            self.record(slot, opening.committed)

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        """Run one pass; one result per row, None where row.decide is False."""
        if self._features is None:
            return self._verify(rows)
        self._features.clear()
        results = self._verify(rows)
        self._features.attach(rows, results)
        return results

    def _verify(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        keep: list[int] = []
        blocks: list[Block] = []
        last = 0
        for row in rows:
            last += len(row.tokens)
            if row.decide:
                keep.extend(range(last - len(row.proposal.tokens) - 1, last))
                blocks.append(self._block(row))
        parts = [part for row in rows for part in self._parts(row)]
        logits = self._model.run(self._cache, parts, keep)  # [sum of k + 1, V]
        if not blocks:
            return [None] * len(rows)
        grammars = [self._requests[row.slot].grammar for row in rows if row.decide]
        decided = iter(verify_blocks(logits, blocks, grammars))
        results = [next(decided) if row.decide else None for row in rows]
        moves = [move for row, result in zip(rows, results, strict=True) for move in self._moves(row, result)]
        self._model.move(self._cache, moves)
        return results

    def _parts(self, row: Row) -> Sequence[SlotRow]:
        """A tree stands behind the committed tokens that are run with it."""
        proposal = row.proposal
        if not proposal.parents:
            return (SlotRow(row.slot, row.tokens, row.start),)
        count = len(row.tokens) - len(proposal.tokens)
        cells = self._cells(row)
        paths: list[list[int]] = []
        for cell, parent in zip(cells, proposal.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ()), cell])
        return (
            SlotRow(row.slot, row.tokens[:count], row.start),
            SlotRow(row.slot, proposal.tokens, row.start + count, paths),
        )

    def _cells(self, row: Row) -> list[int]:
        """Of each node: on the most likely path, where the prefix goes on; for the others, scratch next to it."""
        proposal = row.proposal
        following = self._scratch + row.start + len(row.tokens) - len(proposal.tokens)
        likely = {node: following + depth for depth, node in enumerate(main_path(proposal.parents))}
        scratch = iter(range(self._scratch - 1, -1, -1))
        return [likely[node] if node in likely else next(scratch) for node in range(len(proposal.tokens))]

    def _moves(self, row: Row, result: VerificationResult | None) -> list[Move]:
        """What of an accepted path lies beside the prefix."""
        proposal = row.proposal
        if result is None or not proposal.parents or not result.accepted:
            return []
        path = follow(proposal.tokens, proposal.parents, result.tokens[: result.accepted])
        cells, start = self._cells(row), row.start + len(row.tokens) - len(proposal.tokens)
        return [
            Move(row.slot, cells[node], start + depth) for depth, node in enumerate(path) if cells[node] < self._scratch
        ]

    def record(self, slot: int, tokens: Sequence[int]) -> None:
        """`tokens` were committed in `slot`."""
        request = self._requests[slot]
        request.output.extend(tokens)
        if request.grammar is not None:
            request.grammar.advance(tokens)

    def detach(self, slot: int) -> None:
        """Give the slot back. What is cached stays, and is overwritten by whoever comes next."""
        self._requests.pop(slot, None)

    def _block(self, row: Row) -> Block:
        request = self._requests[row.slot]
        opening, proposal = request.opening, row.proposal
        return Block(
            sampling=opening.sampling,
            seed=opening.seed,
            position=row.start + len(row.tokens) - len(proposal.tokens),
            prompt=opening.prompt,
            output=request.output,
            drafts=proposal.tokens,
            supports=proposal.supports,
            rule=self._settings.rule,
            eos=self._model.eos,
            parents=proposal.parents,
            sequence=opening.sequence,
        )

    def _read_grammar(self, opening: OpenSequence) -> GrammarMatcher | None:
        text = opening.sampling.grammar
        if text is None:
            return None
        if self._grammars is None:
            raise InvalidSettingError("this deployment has no grammar support", "response_format")
        return self._grammars.matcher(text)
