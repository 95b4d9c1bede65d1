"""The outcome forest against its contract: bounded, never asking twice, keeping exactly what came true."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.algorithms.outcome_tree import IDLE_WEIGHT, QUIET_AFTER, QUIET_ROUNDS, Forest
from actors.engines.protocol import Expand, Ranked
from actors.messages import EMPTY_PREFIX, Support, prefix_key
from actors.settings import TreeSettings

PROMPT = (5, 6, 7)
KEY = prefix_key(PROMPT)


def answer(request: Expand, tokens=(1, 2, 3), confidences=(0.6, 0.2, 0.1)) -> Ranked:
    return Ranked(request.sequence, request.path, tuple(tokens), tuple(confidences))


def forest_with(*names: str, **tree) -> Forest:
    forest = Forest(TreeSettings(**({"width": 8, "branching": 3, "min_reach": 0.0} | tree)))
    for name in names:
        forest.open(name, KEY, len(PROMPT))
    return forest


def step(forest: Forest, limit: int = 8):
    requests = forest.frontier(limit)
    return requests, forest.grow([answer(r) for r in requests])


def grown_forest(steps: int = 6, **tree) -> Forest:
    forest = forest_with("a", **tree)
    for _ in range(steps):
        step(forest)
    return forest


def held(forest: Forest, sequence: str = "a") -> dict[tuple[int, ...], float]:
    return forest.tree(sequence).expanded()


def test_the_first_thing_asked_is_the_committed_prefix():
    forest = forest_with("a")
    assert forest.frontier(8) == [Expand("a", ())]
    assert forest.frontier(8) == []  # it was handed out
    (expansion,) = forest.grow([answer(Expand("a", ()))])["a"]
    assert (expansion.parent, expansion.position) == (KEY, 3)
    assert expansion.tokens == (1, 2, 3)  # a pass may verify the alternatives too
    assert expansion.confidences == pytest.approx((0.6, 0.2, 0.1))


def test_best_first_by_reach():
    """Reaches are products of confidences: .6, .2, .1, then under (1,): .36, .12, .06. The two best of all that is
    not expanded are (1, 1) with .36 and (2,) with .2, after (1,) with .6."""
    forest = forest_with("a")
    step(forest)
    assert [r.path for r in forest.frontier(1)] == [(1,)]
    forest.grow([answer(Expand("a", (1,)))])
    assert [r.path for r in forest.frontier(4)] == [(1, 1), (2,), (1, 2), (3,)]


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_what_is_drawn_in_one_tree_gives_its_neighbours_no_more_and_no_less(chosen: int):
    """Sequence a draws 0, 1 or 2, and the draft is the surer of what follows the larger that is. Which of the trees'
    nodes are asked for, by rank, is what it is for the 0."""

    def asked(drawn: int) -> list[tuple[str, tuple[int, ...]]]:
        orders = {"a": (drawn, *(token for token in range(3) if token != drawn)), "b": (0, 1, 2)}
        found = []
        forest = forest_with("a", "b", nodes=64)
        for _ in range(40):
            for request in forest.frontier(1):
                name, path, order = request.sequence, request.path, orders[request.sequence]
                found.append((name, tuple(order.index(token) for token in path)))
                q = 0.3 + 0.3 * path[0] if name == "a" and path else 0.4
                shares = (q, (1 - q) / 2, (1 - q) / 2)
                forest.grow([Ranked(name, path, order, shares, Support(order, shares))])
        return found

    assert {name for name, _ in asked(chosen)} == {"a", "b"}
    assert asked(chosen) == asked(0)


def test_expansions_name_prefixes_by_content():
    forest = grown_forest(1)
    requests, grown = step(forest)
    for request, expansion in zip(requests, grown["a"], strict=True):
        assert expansion.parent == prefix_key(request.path, KEY)
        assert expansion.position == len(PROMPT) + len(request.path)


def test_sequences_share_a_step_by_reach_and_weight():
    """Both roots are expanded; with weight 1/4 b's best (.6) counts .15, less than a's second (.2)."""
    forest = forest_with("a", "b")
    step(forest)
    forest.set_weight("b", 0.25)
    assert forest.frontier(3) == [Expand("a", (1,)), Expand("a", (2,)), Expand("b", (1,))]


def test_a_sequence_that_wants_nothing_is_still_kept_up_with():
    forest = forest_with("a", min_reach=0.015)
    forest.set_weight("a", 0.0)
    assert forest.frontier(8) == [Expand("a", ())]
    forest.grow([answer(Expand("a", ()))])
    assert forest.frontier(8) == []  # .6 times the idle weight is below min_reach
    assert IDLE_WEIGHT * 0.6 < 0.015 < IDLE_WEIGHT


def test_where_nobody_wants_anything_the_draft_is_quiet_but_for_one_round_in_many():
    """Rounds of two commits each: the first 64 are as ever, then all are kept up with in one round of 16."""
    forest = forest_with("a", "b")
    expanded = []
    for turn in range(32 + 2 * QUIET_ROUNDS):
        asked = forest.frontier(8)
        forest.grow([answer(request) for request in asked])
        expanded.append(len(asked))
        for name in ("a", "b"):
            forest.commit(name, 3 + turn, (9,))
            forest.set_weight(name, 0.0)
    quiet_round = [0] * (QUIET_ROUNDS - 1)
    assert QUIET_AFTER == 2 * 32
    assert expanded == [*[2] * 32, *quiet_round, 2, *quiet_round, 2]


def test_one_commit_that_wants_something_ends_the_quiet_for_all():
    forest = forest_with("a", "b")
    step(forest)
    for i in range(QUIET_AFTER):
        forest.commit("a", 3 + i, (9,))
        forest.set_weight("a", 0.0)
    assert forest.quiet
    assert {r.sequence for r in forest.frontier(8)} == {"b"}  # it has not said that it wants nothing
    forest.grow([])
    forest.set_weight("b", 1.0)
    assert not forest.quiet
    assert Expand("a", ()) in forest.frontier(8)


def test_unlikely_nodes_are_not_expanded_until_they_are_likely():
    forest = forest_with("a", min_reach=0.15)
    for _ in range(5):
        step(forest)
    assert set(held(forest)) == {(), (1,), (2,), (1, 1), (1, 1, 1)}  # 1, .6, .2, .36, .216; next .13
    forest.commit("a", 3, (1,))
    assert [r.path for r in forest.frontier(8)] == [(1, 1, 1), (2,)]  # (1, 1, 1, 1) and (1, 2): .216 and .2
    assert held(forest)[(1,)] == pytest.approx(0.6)


def test_depth_bounds_the_tree():
    """At depth 2 the root (children at depth 1) and its children (at depth 2) are expanded, and nothing below."""
    forest = grown_forest(10, depth=2)
    assert max(map(len, held(forest))) == 1


def test_commit_keeps_exactly_the_true_branch():
    forest = grown_forest()
    before = held(forest)
    assert forest.commit("a", 3, (1, 2)) == 2
    expected = {p[2:]: reach / before[(1, 2)] for p, reach in before.items() if p[:2] == (1, 2)}
    assert held(forest) == pytest.approx(expected)
    assert forest.size("a") == len(expected)
    assert forest.position("a") == 5


def test_a_surprise_starts_afresh():
    forest = grown_forest()
    assert forest.commit("a", 3, (1, 9)) == 2
    assert forest.size("a") == 0
    assert forest.frontier(8) == [Expand("a", ())]
    (expansion,) = forest.grow([answer(Expand("a", ()))])["a"]
    assert (expansion.parent, expansion.position) == (prefix_key((1, 9), KEY), 5)


def test_overlapping_and_repeated_commits_are_taken_once():
    once, twice = grown_forest(), grown_forest()
    once.commit("a", 3, (1, 1, 2))
    twice.commit("a", 3, (1, 1))
    assert twice.commit("a", 3, (1, 1)) == 0
    assert twice.commit("a", 4, (1, 2)) == 1
    assert held(once) == pytest.approx(held(twice))
    assert once.position("a") == twice.position("a") == 6


def test_a_gap_is_reported_and_changes_nothing():
    forest = grown_forest()
    before = held(forest)
    assert forest.commit("a", 4, (1,)) == "behind"
    assert held(forest) == before
    assert forest.commit("nobody", 0, (1,)) == "unknown"


def test_an_answer_that_a_commit_overtook_is_not_misfiled():
    """(2,) was asked; then (1,) was committed, so the same path now names another prefix."""
    forest = grown_forest(1)
    requests = forest.frontier(8)
    assert {r.path for r in requests} == {(1,), (2,), (3,)}
    forest.commit("a", 3, (1,))
    grown = forest.grow([answer(r) for r in requests])
    (expansion,) = grown["a"]  # the answer to (1,) is about the new root; the others are about what is gone
    assert (expansion.parent, expansion.position) == (prefix_key((1,), KEY), 4)
    assert set(held(forest)) == {()}


def test_answers_for_closed_and_reopened_sequences_are_dropped():
    forest = grown_forest(1)
    requests = forest.frontier(8)
    forest.close("a")
    forest.open("a", KEY, 3)
    assert forest.grow([answer(r) for r in requests]) == {}
    assert forest.frontier(8) == [Expand("a", ())]
    forest.close("a")
    assert forest.frontier(8) == []


def test_an_unfinished_prefill_is_asked_for_again():
    forest = forest_with("a")
    assert forest.frontier(8) == [Expand("a", ())]
    assert forest.grow([]) == {}
    assert forest.frontier(8) == [Expand("a", ())]


def test_a_node_that_the_engine_refuses_is_not_asked_for_for_ever():
    forest = grown_forest(1)
    assert len(forest.frontier(8)) == 3
    forest.grow([])
    assert forest.frontier(8) == []
    assert forest.size("a") == 1


def test_a_lookup_answers_with_a_whole_chain():
    forest = forest_with("a")
    forest.frontier(8)
    chain = (11, 12, 13)
    answers = [Ranked("a", chain[:i], (chain[i],), (0.9,)) for i in range(3)]
    grown = forest.grow([*answers, Ranked("a", (99,), (1,), (0.9,))])["a"]
    assert [e.tokens for e in grown] == [(11,), (12,), (13,)]
    assert [r.path for r in forest.frontier(8)] == [chain]


def test_where_nothing_can_follow_is_not_asked_again():
    forest = grown_forest(1)
    requests = forest.frontier(8)
    forest.grow([Ranked("a", request.path, (), ()) for request in requests])
    assert forest.frontier(8) == []
    forest.commit("a", 3, (1,))
    assert forest.frontier(8) == []  # the same prefix still has nothing to follow it
    forest.commit("a", 4, (1,))
    assert forest.frontier(8) == [Expand("a", ())]


def test_alternatives_beyond_branching_are_cut():
    forest = forest_with("a", branching=2)
    step(forest)
    assert [r.path for r in forest.frontier(8)] == [(1,), (2,)]


def test_confidences_are_learned_from_commits():
    """The draft claims .6 for its first child; it comes true 9 times in 10. With a prior of 6 observations and 60
    nodes per round the estimate is about (6 · .6 + .9 · n) / (6 + n), above .8 from n = 20 on."""
    forest = forest_with("a", branching=1)
    position = 3
    for i in range(60):
        requests = forest.frontier(1)
        grown = forest.grow([answer(r) for r in requests])
        forest.commit("a", position, (9,) if i % 10 == 0 else (1,))
        position += 1
    assert grown["a"][0].confidences[0] > 0.8


def test_a_slow_row_makes_steps_narrow():
    """Rows that cost as much as the step itself: adding a node of reach r to a step that gains G in s seconds pays
    while r·s > G·slope. After the root, (1,) gains .6 in 2 units; (2,) with .2 would need .2·2 > .6·1."""
    forest = grown_forest(1)
    for _ in range(40):
        forest.observe_step(1, 0.002)
        forest.observe_step(4, 0.005)
    assert [r.path for r in forest.frontier(8)] == [(1,)]


def test_free_rows_leave_steps_wide():
    forest = grown_forest(1)
    for _ in range(40):
        forest.observe_step(1, 0.003)
        forest.observe_step(4, 0.003)
    assert len(forest.frontier(8)) == 3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 64), st.integers(2, 12))
def test_nodes_are_bounded_per_sequence_and_in_all(nodes, total, sequences):
    forest = Forest(TreeSettings(nodes=nodes, branching=3, min_reach=0.0), total=total)
    for i in range(sequences):
        forest.open(str(i), prefix_key([i]), 1)
    for _ in range(30):
        step(forest, 16)
        assert forest.size() <= total
        assert all(forest.size(str(i)) <= nodes for i in range(sequences))


class ForestMachine(RuleBasedStateMachine):
    """Any order of steps, commits and lost answers, against a set of what has been asked and what is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.forest = Forest(TreeSettings(nodes=20, branching=3, depth=5, min_reach=0.0))
        self.committed: dict[str, list[int]] = {}
        self.expanded: dict[str, set[tuple[int, ...]]] = {}
        """Absolute prefixes that were answered."""
        self.flying: list[tuple[Expand, tuple[int, ...]]] = []

    @rule(name=st.sampled_from("ab"))
    def open(self, name):
        self.forest.open(name, EMPTY_PREFIX, 0)
        self.committed[name], self.expanded[name] = [], set()
        self.flying = [(r, p) for r, p in self.flying if r.sequence != name]

    @rule(limit=st.integers(1, 6))
    def ask(self, limit):
        if self.flying:
            return
        for request in self.forest.frontier(limit):
            prefix = (*self.committed[request.sequence], *request.path)
            assert prefix not in self.expanded[request.sequence], "asked twice"
            # The engine can only go one step past what it has expanded, or to the committed prefix.
            assert not request.path or prefix[:-1] in self.expanded[request.sequence]
            assert len(request.path) < 5
            self.flying.append((request, prefix))
        assert len({prefix for _, prefix in self.flying}) == len(self.flying) or len(self.committed) > 1

    @rule(data=st.data())
    def answer(self, data):
        kept = [item for item in self.flying if data.draw(st.booleans(), label=str(item[0]))]
        self.flying = []
        grown = self.forest.grow([answer(request) for request, _ in kept])
        keys = {prefix_key(prefix): (r.sequence, prefix) for r, prefix in kept}
        for name, expansions in grown.items():
            for expansion in expansions:
                _, prefix = keys[expansion.parent]
                assert expansion.position == len(prefix)
                assert prefix[: len(self.committed[name])] == tuple(self.committed[name]), "a freed node was sent"
                self.expanded[name].add(prefix)

    @rule(name=st.sampled_from("ab"), tokens=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def commit(self, name, tokens):
        if name in self.committed:
            assert self.forest.commit(name, len(self.committed[name]), tokens) == len(tokens)
            self.committed[name] += tokens

    @rule(name=st.sampled_from("ab"))
    def close(self, name):
        self.forest.close(name)
        self.committed.pop(name, None)
        self.flying = [(r, p) for r, p in self.flying if r.sequence != name]

    @invariant()
    def trees_hold_exactly_what_agrees_with_the_committed_tokens(self):
        for name, committed in self.committed.items():
            tree = self.forest.tree(name)
            n = len(committed)
            assert tree.position == n
            expected = {p[n:] for p in self.expanded[name] if p[:n] == tuple(committed)}
            assert set(tree.expanded()) == expected
            assert tree.size <= 20
            assert all(0.0 < reach <= 1.0 + 1e-9 for reach in tree.expanded().values())


TestForestMachine = ForestMachine.TestCase
TestForestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
