"""The proposal broker: which draft tokens of which sequences the next pass verifies, whatever engine runs it.

It holds the mailbox and the lookahead controller, and knows of each sequence how far it is committed and what is being
verified. The scheduler asks it for engines that it drives (scheduler.py), the exchange for those that schedule
themselves (pass_exchange.py). It knows nothing of engines, links or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.algorithms.control.lookahead import LookaheadController
from actors.algorithms.draft_tree import branch_chances, branch_points, follow, main_path
from actors.engines.protocol import Proposal
from actors.messages import OpenSequence, ProposalBatch, VerificationResult
from actors.settings import TargetSettings
from actors.target.mailbox import NOTHING, Mailbox


@dataclass(slots=True, eq=False)
class _Sequence:
    opening: OpenSequence
    length: int
    """Prompt and committed tokens, as far as the broker has heard."""
    proposal: Proposal = NOTHING
    """What the pass under way verifies."""
    declined: bool = False
    starved: bool = False
    is_foreseen: bool = True
    """Drafts that continue what the last pass committed may come before the draft hears of it."""


MOST_IN_PASS = 1024
"""Nodes of all sequences that are looked at for one pass: ranking takes a few microseconds a node. Where that is not
even a whole path for each, in batches of a hundred or so, alternatives hardly ever pay, and the best paths are taken,
which are kept from pass to pass."""


class ProposalBroker:
    """Drafts for the sequences of one target. Used from one thread at a time.

    clock: monotonic seconds. controller: decides how much is verified; one by `settings` unless it is given. trees: the
    engine verifies trees; they are proposed under the coupled rule, where no choice of nodes changes a token.
    """

    def __init__(
        self,
        settings: TargetSettings,
        vocabulary: int,
        clock: Callable[[], float],
        controller: LookaheadController | None = None,
        *,
        trees: bool = False,
    ) -> None:
        lookahead = settings.lookahead
        self._tree_nodes = (
            lookahead.tree if trees and settings.rule == "coupled" and lookahead.mode == "adaptive" else 0
        )
        """Most nodes of a sequence in a pass; 0: the best path."""
        self.mailbox = Mailbox(vocabulary, context=settings.context)
        self.controller = controller or LookaheadController(settings.lookahead, settings.rule)
        self._settings = settings
        self._clock = clock
        self._sequences: dict[str, _Sequence] = {}

    # -- sequences ------------------------------------------------------------------------------------------------

    def open(self, opening: OpenSequence) -> None:
        """Take offers for a sequence from now on."""
        tokens = (*opening.prompt, *opening.committed)
        self._sequences[opening.sequence] = _Sequence(opening, len(tokens))
        if opening.sampling.speculation:
            self.mailbox.open(opening.sequence, tokens)

    def close(self, sequence: str) -> bool:
        """Forget a sequence. False for one that is not known."""
        if self._sequences.pop(sequence, None) is None:
            return False
        self.mailbox.close(sequence)
        self.controller.forget(sequence)
        return True

    def offer(self, batch: ProposalBatch) -> bool:
        """File proposals. True if any was for a sequence here, in time or too late for its position."""
        touched = self.mailbox.offer(batch)
        if touched:
            now = self._clock()
            for sequence in touched:
                self.controller.observe_offer(now, sequence)
        return bool(touched)

    def length(self, sequence: str) -> int | None:
        """Prompt and committed tokens of a sequence, None for one that is not known."""
        state = self._sequences.get(sequence)
        return state.length if state is not None else None

    @property
    def positions(self) -> int:
        """Prompt and committed tokens of all sequences."""
        return sum(state.length for state in self._sequences.values())

    def speculates(self, sequence: str) -> bool:
        """Is it known, and does its request allow drafts?"""
        state = self._sequences.get(sequence)
        return state is not None and state.opening.sampling.speculation

    # -- the pass: hold, propose, commit ----------------------------------------------------------------------------

    def room(self, sequence: str) -> int:
        """Most draft tokens worth verifying, 0 without speculation: a pass commits one token more than it accepts."""
        if not self.speculates(sequence):
            return 0
        state = self._sequences[sequence]
        left = state.opening.sampling.max_tokens - (state.length - len(state.opening.prompt))
        context = self._settings.context - state.length
        return max(0, min(self._settings.lookahead.maximum, left - 1, context - 1))

    def is_foreseen(self, sequence: str) -> bool:
        """May drafts of this sequence be of use before the draft hears of the last commit?"""
        return self._sequences[sequence].is_foreseen

    def hold(self, now: float, wanting: Sequence[str], others: int) -> float:
        """Seconds the next pass is worth holding for drafts that are due; 0 means go.

        wanting: sequences of the pass with room for drafts. others: how many more are in it.
        """
        if not wanting:
            return 0.0
        limit = self._settings.lookahead.maximum
        ready = {name: len(self.mailbox.path(name, limit).tokens) for name in wanting}
        return self.controller.hold(now, ready, others)

    def propose(self, wanting: Sequence[str], rows: int) -> dict[str, Proposal]:
        """What the pass formed now verifies of each sequence; those without any draft are left out.

        wanting: sequences of the pass with room for drafts; unknown ones are ignored. rows: of the pass that decide.
        """
        most = min(self._tree_nodes, MOST_IN_PASS // max(rows, 1))
        paths = {name: self._at_hand(name, most) for name in wanting if name in self._sequences}
        trees = {name: path.parents for name, path in paths.items() if path.parents}
        lookahead = self.controller.plan({name: path.confidences for name, path in paths.items()}, rows, trees)
        proposals: dict[str, Proposal] = {}
        for name, path in paths.items():
            state, k = self._sequences[name], lookahead[name]
            state.proposal = path.cut(k)
            state.declined = k == 0 if path.tokens else self.controller.is_off
            state.starved = not path.tokens and not state.declined
            if k:
                proposals[name] = state.proposal
        return proposals

    def _at_hand(self, name: str, most: int) -> Proposal:
        """The drafts that may be verified, best first."""
        room = self.room(name)
        if most > self._settings.lookahead.maximum:
            return self.mailbox.tree(name, most, room, self.controller.least_reach)
        return self.mailbox.path(name, room)

    def commit(self, result: VerificationResult) -> bool:
        """A pass has ended for one sequence: learn from it, move the committed prefix on, mark `result`.

        False, and nothing is done, where the sequence has ended or the result was heard before. After a gap (results
        were lost) nothing more is proposed for the sequence: drafts would be for another prefix.
        """
        name = result.sequence
        state = self._sequences.get(name)
        if state is None or result.position < state.length:
            return False
        if result.position > state.length:
            self.mailbox.close(name)
        result.declined, result.starved = state.declined, state.starved
        chances = _on_path(state.proposal, result)[: result.proposed]
        if result.proposed and result.error is None:
            self.controller.observe_block(name, chances, min(result.accepted, result.proposed), len(result.branches))
        state.proposal, state.declined, state.starved = NOTHING, False, False
        state.length = result.position + len(result.tokens)
        state.is_foreseen = self.mailbox.commit(name, result.tokens)
        return True


def _on_path(proposal: Proposal, result: VerificationResult) -> Sequence[float]:
    """The chance that a draft token is accepted, at each place on the path. Of a tree, `result` is told its path."""
    tokens, parents = proposal.tokens, proposal.parents
    if not parents:
        return proposal.confidences
    path = follow(tokens, parents, result.tokens[: result.accepted])
    result.proposed = len(path) + len(main_path(parents, path[-1] if path else -1))
    result.branches = tuple(branch_points(parents, path))
    return branch_chances(proposal.confidences, parents, path)
