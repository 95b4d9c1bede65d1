"""The mailbox: what is stale, late, repeated or malformed never changes which path a pass gets."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from actors.engines.protocol import Proposal
from actors.messages import Expansion, ProposalBatch, Support, extend_key, prefix_key
from actors.target.mailbox import Mailbox

PROMPT = [5, 6, 7]


def expansion(prefix: list[int], *tokens: int, support: Support | None = None) -> Expansion:
    return Expansion(prefix_key(prefix), len(prefix), tokens, (0.5,) * len(tokens), support)


def offer(*expansions: Expansion, sequence: str = "s") -> ProposalBatch:
    return ProposalBatch("draft", {sequence: list(expansions)})


def opened(capacity: int = 1024) -> Mailbox:
    mailbox = Mailbox(vocabulary=100, capacity=capacity)
    mailbox.open("s", PROMPT)
    return mailbox


def test_keys_depend_on_order_and_content() -> None:
    assert prefix_key([1, 2]) != prefix_key([2, 1])
    assert prefix_key([1, 2, 3]) == extend_key(prefix_key([1, 2]), 3)
    assert prefix_key([0]) != prefix_key([0, 0]) != prefix_key([])


def test_path_follows_the_first_child_up_to_the_limit() -> None:
    mailbox = opened()
    mailbox.offer(offer(expansion(PROMPT, 1, 2), expansion([*PROMPT, 1], 3), expansion([*PROMPT, 1, 3], 4)))
    assert mailbox.path("s", 8).tokens == (1, 3, 4)
    assert mailbox.path("s", 2).tokens == (1, 3)
    assert mailbox.path("s", 0) == Proposal()


def test_an_alternative_serves_once_a_commit_has_chosen_it() -> None:
    mailbox = opened()
    mailbox.offer(offer(expansion(PROMPT, 1, 2), expansion([*PROMPT, 2], 9)))
    assert mailbox.path("s", 8).tokens == (1,)
    mailbox.commit("s", [2])
    assert mailbox.path("s", 8).tokens == (9,)


def test_a_disagreeing_commit_leaves_nothing() -> None:
    mailbox = opened()
    mailbox.offer(offer(expansion(PROMPT, 1), expansion([*PROMPT, 1], 3)))
    mailbox.commit("s", [8])
    assert mailbox.path("s", 8) == Proposal()
    mailbox.commit("s", [3])
    assert len(mailbox) == 0


def test_an_offer_that_was_overtaken_by_the_commit_still_serves_where_it_agrees() -> None:
    mailbox = opened()
    mailbox.commit("s", [1])
    mailbox.offer(offer(expansion(PROMPT, 1), expansion([*PROMPT, 1], 3)))
    assert mailbox.path("s", 8).tokens == (3,)
    assert len(mailbox) == 1


def test_children_may_arrive_before_their_parents_and_twice() -> None:
    mailbox = opened()
    late, early = expansion(PROMPT, 1), expansion([*PROMPT, 1], 3)
    assert mailbox.offer(offer(early)) == ["s"]
    assert mailbox.path("s", 8) == Proposal()
    mailbox.offer(offer(late))
    assert mailbox.offer(offer(late, early)) == []
    assert mailbox.path("s", 8).tokens == (1, 3)


def test_an_offer_that_comes_too_late_shows_that_the_draft_follows() -> None:
    mailbox = opened()
    mailbox.commit("s", [1])
    assert mailbox.offer(offer(expansion(PROMPT, 1))) == ["s"]
    assert len(mailbox) == 0


def test_a_commit_tells_whether_the_draft_may_have_foreseen_it() -> None:
    mailbox = opened()
    assert mailbox.commit("s", [1])  # nothing was named
    mailbox.offer(offer(expansion([*PROMPT, 1], 2, 9), expansion([*PROMPT, 1, 2], 3), expansion([*PROMPT, 1, 9], 4)))
    assert mailbox.commit("s", [9])  # not the likeliest, but named
    assert not mailbox.commit("s", [5])  # 4 was named after 9
    assert mailbox.commit("s", [6])
    assert mailbox.commit("stranger", [1])


def test_of_two_answers_for_one_node_the_first_stays() -> None:
    mailbox = opened()
    mailbox.offer(offer(expansion(PROMPT, 1)))
    mailbox.offer(offer(expansion(PROMPT, 2)))
    assert mailbox.path("s", 8).tokens == (1,)


def test_malformed_offers_are_dropped_and_harm_nobody() -> None:
    mailbox = opened()
    bad = [
        expansion(PROMPT, 100),
        expansion(PROMPT, -1),
        Expansion(prefix_key(PROMPT), 3, (), ()),
        Expansion(prefix_key(PROMPT), 3, (1, 2), (0.5,)),
        Expansion(prefix_key(PROMPT), 3, (1,), (float("nan"),)),
        Expansion(prefix_key(PROMPT), 3, (1,), (-0.5,)),
        Expansion(prefix_key(PROMPT), 3, (1,), (float("inf"),)),
    ]
    assert mailbox.offer(ProposalBatch("draft", {"s": bad, "stranger": [expansion(PROMPT, 1)]})) == []
    assert mailbox.path("s", 8) == mailbox.path("stranger", 8) == Proposal()
    assert mailbox.malformed == len(bad)
    assert mailbox.offer(offer(expansion(PROMPT, 1))) == ["s"]


def test_trees_that_make_no_sense_are_dropped_and_counted() -> None:
    mailbox = Mailbox(vocabulary=5000, context=16)
    mailbox.open("s", PROMPT)
    key = prefix_key(PROMPT)
    bad = [
        Expansion(key, 3, (1, 2, 1), (0.3, 0.3, 0.3)),  # a sibling twice
        Expansion(key, 3, tuple(range(1000)), (0.001,) * 1000),  # more children than any draft should name
        Expansion(key, 16, (1,), (0.5,)),  # past the context
    ]
    assert mailbox.offer(ProposalBatch("draft", {"s": bad})) == []
    assert mailbox.malformed == len(bad)
    assert len(mailbox) == 0


def test_nodes_of_other_prefixes_are_never_asked_for() -> None:
    """A node that names itself or another sequence's prefix as its parent is a key that nothing comes to."""
    mailbox = opened()
    stranger = expansion((9, 9, 9), 1)
    circle = Expansion(prefix_key([*PROMPT, 1]), 3, (1,), (0.9,))  # the child of (1,), one position too early
    mailbox.offer(offer(stranger, circle, expansion(PROMPT, 1, 2)))
    assert mailbox.tree("s", 64, 8).tokens == (1, 2)
    mailbox.commit("s", [1])
    assert mailbox.tree("s", 64, 8) == Proposal()
    assert len(mailbox) == 0  # what nobody asked for fell out with its position


def test_a_tree_moves_along_with_what_is_committed() -> None:
    mailbox = opened()
    mailbox.offer(offer(expansion(PROMPT, 1, 2), expansion([*PROMPT, 2], 3, 4), expansion([*PROMPT, 2, 4], 5)))
    before = mailbox.tree("s", 64, 8)
    assert before.tokens == (1, 2, 3, 4, 5)  # reaches: .5 .5 .25 .25 .125
    assert before.parents == (-1, -1, 1, 1, 3)
    mailbox.commit("s", [2])
    after = mailbox.tree("s", 64, 8)
    assert (after.tokens, after.parents) == ((3, 4, 5), (-1, -1, 1))
    mailbox.offer(offer(expansion([*PROMPT, 2, 3], 6)))
    assert mailbox.tree("s", 64, 8).tokens == (3, 4, 6, 5)
    assert mailbox.tree("s", 2, 8).parents == (-1, -1)
    assert mailbox.path("s", 8).tokens == (3, 6)  # a path follows the sampled child


def test_a_token_without_q_is_one_hot_where_others_have_q() -> None:
    q = Support((1, 4), (0.75, 0.25))
    mailbox = opened()
    mailbox.offer(offer(expansion(PROMPT, 1, support=q), expansion([*PROMPT, 1], 3)))
    assert mailbox.path("s", 8).supports == (q, Support((3,), (1.0,)))


def test_memory_is_bounded_and_the_deepest_give_way() -> None:
    mailbox = opened(capacity=4)
    prefix = list(PROMPT)
    for token in range(10):
        mailbox.offer(offer(expansion(prefix, token)))
        prefix.append(token)
    assert len(mailbox) == 4
    assert mailbox.path("s", 99).tokens == (0, 1, 2, 3)


@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_any_order_of_offers_and_commits_yields_only_true_continuations(seed: int, lost: float) -> None:
    """Offers of a random tree, shuffled, repeated and partly lost: a path is always one of the tree's."""
    rng = random.Random(seed)
    mailbox = opened()
    truth = {}
    frontier = [list(PROMPT)]
    messages = []
    for _ in range(30):
        prefix = frontier.pop(rng.randrange(len(frontier)))
        tokens = tuple(rng.sample(range(6), 3))
        truth[tuple(prefix)] = tokens
        frontier += [[*prefix, token] for token in tokens]
        messages += [expansion(prefix, *tokens)] * rng.choice([1, 1, 2])
    rng.shuffle(messages)
    committed = list(PROMPT)
    for message in messages:
        if rng.random() > lost:
            mailbox.offer(offer(message))
        if rng.random() < 0.2:
            token = rng.randrange(6)
            mailbox.commit("s", [token])
            committed.append(token)
        walked = list(committed)
        for token in mailbox.path("s", 8).tokens:
            assert truth[tuple(walked)][0] == token
            walked.append(token)
    mailbox.close("s")
    assert len(mailbox) == 0


class Plain:
    """A mailbox that keeps nothing but expansions, and walks every path afresh."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = list(PROMPT)
        self.filed: dict[tuple[int, int], Expansion] = {}

    def offer(self, *expansions: Expansion) -> None:
        for one in expansions:
            if one.position >= len(self.committed):
                self.filed.setdefault((one.position, one.parent), one)
        while len(self.filed) > self.capacity:
            deepest = max(position for position, _ in self.filed)
            self.filed = {at: one for at, one in self.filed.items() if at[0] < deepest}

    def commit(self, tokens: list[int]) -> None:
        self.committed += tokens
        self.filed = {at: one for at, one in self.filed.items() if at[0] >= len(self.committed)}

    def path(self, limit: int) -> list[int]:
        walked = list(self.committed)
        while len(walked) < len(self.committed) + limit:
            one = self.filed.get((len(walked), prefix_key(walked)))
            if one is None:
                break
            walked.append(one.tokens[0])
        return walked[len(self.committed) :]


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_kept_path_is_what_a_fresh_walk_would_find(seed: int, capacity: int) -> None:
    """Three tokens, so that commits agree with the path often, in part or wholly; too little room for all offers."""
    rng = random.Random(seed)
    mailbox, plain = opened(capacity), Plain(capacity)
    for _ in range(60):
        match rng.choice(("offer", "commit", "path")):
            case "offer":
                start = plain.committed[: rng.randint(len(PROMPT), len(plain.committed))]
                prefix = [*start, *(rng.randrange(3) for _ in range(rng.randrange(4)))]
                some = [expansion(prefix, rng.randrange(3)), expansion([*prefix, 1], rng.randrange(3))]
                mailbox.offer(offer(*some))
                plain.offer(*some)
            case "commit":
                agreeing = plain.path(rng.randrange(4))
                tokens = [*agreeing, *(rng.randrange(3) for _ in range(rng.randrange(2)))]
                mailbox.commit("s", tokens)
                plain.commit(tokens)
            case "path":
                limit = rng.randrange(6)
                assert list(mailbox.path("s", limit).tokens) == plain.path(limit)
        assert len(mailbox) == len(plain.filed)
