"""The proposal broker: what of each sequence a pass verifies, and what it learns from what the pass decided."""

from __future__ import annotations

from typing import Any

import pytest

from actors.messages import Expansion, OpenSequence, ProposalBatch, VerificationResult, prefix_key
from actors.settings import LookaheadSettings, Rule, SamplingSettings, TargetSettings
from actors.target.proposal_broker import ProposalBroker

PROMPT = (5, 6)


def opening(name: str = "a", **sampling: Any) -> OpenSequence:
    return OpenSequence(name, PROMPT, SamplingSettings(**{"max_tokens": 10} | sampling), seed=0)


def broker(context: int = 256, **lookahead: Any) -> ProposalBroker:
    chosen = LookaheadSettings(**{"mode": "fixed", "maximum": 3, "wait": "never"} | lookahead)
    return ProposalBroker(TargetSettings(context=context, lookahead=chosen), 100, lambda: 0.0)


def offer(it: ProposalBroker, prefix: tuple[int, ...], *tokens: int, sequence: str = "a") -> bool:
    path = [*prefix, *tokens]
    chain = [Expansion(prefix_key(path[:i]), i, (path[i],), (0.5,)) for i in range(len(prefix), len(path))]
    return it.offer(ProposalBatch("draft", {sequence: chain}))


def test_a_pass_verifies_what_continues_the_committed_prefix() -> None:
    it = broker()
    for name in "abc":
        it.open(opening(name, speculation=name != "c"))
    assert offer(it, PROMPT, 7, 8, 9, 10)
    assert not offer(it, PROMPT, 7, sequence="stranger")
    assert [it.room(name) for name in ("a", "b", "c", "stranger")] == [3, 3, 0, 0]
    proposals = it.propose(["a", "b", "stranger"], rows=3)
    assert {name: proposal.tokens for name, proposal in proposals.items()} == {"a": (7, 8, 9)}
    results = [VerificationResult("a", 2, (7, 8, 50), 3, 2), *(VerificationResult(n, 2, (1,)) for n in "bc")]
    assert [it.commit(result) for result in results] == [True] * 3
    assert [(result.declined, result.starved) for result in results] == [(False, False), (False, True), (False, False)]
    assert (it.length("a"), it.length("c"), it.length("stranger"), it.positions) == (5, 3, None, 11)
    assert it.propose(["a"], rows=1) == {}  # 50 was not foreseen


@pytest.mark.parametrize(("max_tokens", "room"), [(10, 3), (3, 2), (1, 0)])
def test_no_more_is_verified_than_can_be_committed(max_tokens: int, room: int) -> None:
    """A pass commits one token more than it accepts: of m tokens that may follow, m - 1 can be drafts."""
    it = broker()
    it.open(opening(max_tokens=max_tokens))
    assert it.room("a") == room


def test_no_more_is_verified_than_the_context_holds() -> None:
    it = broker(context=8)
    it.open(opening())
    it.commit(VerificationResult("a", 2, (1, 2, 3, 4)))
    assert it.room("a") == 1  # six positions are taken: one draft token, and one of the target's own


def test_a_result_counts_once_and_not_after_the_end() -> None:
    it = broker()
    it.open(opening())
    assert it.commit(VerificationResult("a", 2, (7,)))
    assert not it.commit(VerificationResult("a", 2, (7,)))
    assert it.length("a") == 3
    assert it.close("a")
    assert not it.close("a")
    assert not it.commit(VerificationResult("a", 3, (8,)))


def test_after_a_gap_nothing_is_proposed() -> None:
    it = broker()
    it.open(opening())
    offer(it, (*PROMPT, 7), 8)
    assert it.commit(VerificationResult("a", 4, (7,)))
    assert it.length("a") == 5
    assert it.propose(["a"], rows=1) == {}


def test_what_the_draft_foresaw_may_be_continued_before_it_hears_of_it() -> None:
    it = broker()
    it.open(opening())
    offer(it, PROMPT, 7)
    it.commit(VerificationResult("a", 2, (7,)))
    assert it.is_foreseen("a")
    offer(it, (*PROMPT, 7), 8)
    it.commit(VerificationResult("a", 3, (50,)))
    assert not it.is_foreseen("a")


def with_trees(rule: Rule = "coupled", **lookahead: Any) -> ProposalBroker:
    """Two children of the prompt are named, and two of the second one."""
    chosen = LookaheadSettings(**{"maximum": 3, "wait": "never"} | lookahead)
    it = ProposalBroker(TargetSettings(context=256, lookahead=chosen, rule=rule), 100, lambda: 0.0, trees=True)
    it.open(opening())
    tree = [
        Expansion(prefix_key(PROMPT), 2, (7, 8), (0.5, 0.4)),
        Expansion(prefix_key([*PROMPT, 8]), 3, (9, 10), (0.6, 0.3)),
    ]
    it.offer(ProposalBatch("draft", {"a": tree}))
    return it


def test_of_a_tree_only_the_path_is_counted() -> None:
    """Verified are 7 and 8, and 9 and 10 after 8. 8 comes true, an alternative, and the most likely path from there is
    one token long: two tokens on the path, of which one is accepted."""
    it = with_trees()
    (proposal,) = it.propose(["a"], rows=1).values()
    assert proposal.tokens == (7, 8, 9, 10)  # .5, .4, .24, .12
    assert proposal.parents == (-1, -1, 1, 1)
    result = VerificationResult("a", 2, (8, 50), 4, 1)
    assert it.commit(result)
    assert (result.proposed, result.accepted, result.branches) == (2, 1, (0,))
    assert result.origins() == ["branch", "correction"]


def test_a_leaf_that_comes_true_is_followed_by_a_bonus() -> None:
    it = with_trees()
    it.propose(["a"], rows=1)
    result = VerificationResult("a", 2, (7, 50), 4, 1)
    it.commit(result)
    assert (result.proposed, result.branches, result.origins()) == (1, (), ["accepted", "bonus"])


@pytest.mark.parametrize(
    "it",
    [
        with_trees("rejection"),
        with_trees("block"),
        with_trees("typical"),
        with_trees(tree=0),
        with_trees(mode="fixed"),
    ],
)
def test_other_rules_and_modes_verify_the_sampled_path(it: ProposalBroker) -> None:
    (proposal,) = it.propose(["a"], rows=1).values()
    assert (proposal.tokens, proposal.parents) == ((7,), ())


def test_in_a_large_batch_paths_are_verified() -> None:
    """1,024 nodes over 400 rows are not three each, a whole path; over 100 they are ten."""
    it = with_trees()
    (small,) = it.propose(["a"], rows=100).values()
    assert len(small.tokens) == 4
    (large,) = it.propose(["a"], rows=400).values()
    assert (large.tokens, large.parents) == ((7,), ())


def test_nodes_far_below_what_was_worth_verifying_are_not_looked_at() -> None:
    """Passes of 20 + 1 ms a token over one sequence that commits one: a token that adds 1 ms to 22 has to bring 1/22,
    and nodes of less than half of that are left out."""
    it = with_trees()
    for tokens in (1, 2, 3) * 40:
        it.controller.observe_pass(tokens, 1, 0.020 + 0.001 * tokens)
    assert it.controller.least_reach == pytest.approx(0.5 / 22, rel=0.05)
