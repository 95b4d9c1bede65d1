"""Trees of the suffix library become named nodes, and broken ones are refused. Needs no library."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest

from actors.engines.lookup.suffix_draft import ranked
from actors.engines.lookup.suffix_memory import suffix_caches
from actors.engines.protocol import Expand, Ranked
from actors.errors import ConfigError
from actors.messages import Support


@dataclass
class Tree:
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    match_len: int = 3


FORK = Tree([5, 6, 7, 8], [-1, 0, -1, 1], [0.75, 0.375, 0.25, 0.375])
"""5 in 3/4 of the matches and 6 after half of these, always followed by 8; 7 in the other quarter."""


def answers(tree: Tree, *, branching: int = 4, depth: int = 8, certain: bool = False) -> list[Ranked]:
    return ranked(Expand("s", (1, 2)), tree, branching=branching, depth=depth, certain=certain)


def test_nodes_are_named_by_their_paths_and_sure_by_share_and_match() -> None:
    # Three tokens matched at the root, four below 5, five below 6: 3/4, 4/5 and 5/6 of the shares.
    found = answers(FORK)
    assert [(a.path, a.tokens) for a in found] == [((1, 2), (5, 7)), ((1, 2, 5), (6,)), ((1, 2, 5, 6), (8,))]
    assert found[0].confidences == pytest.approx((0.75 * 3 / 4, 0.25 * 3 / 4))
    assert found[1].confidences == pytest.approx((0.5 * 4 / 5,))
    assert found[2].confidences == pytest.approx((5 / 6,))


def test_the_most_frequent_child_is_first() -> None:
    assert answers(Tree([7, 5], [-1, -1], [0.25, 0.75]))[0].tokens == (5, 7)


def test_depth_and_branching_bound_what_is_said() -> None:
    assert [a.tokens for a in answers(FORK, branching=1)] == [(5,), (6,), (8,)]
    assert [a.tokens for a in answers(FORK, depth=2)] == [(5, 7), (6,)]
    below = Tree([5, 7, 9], [-1, -1, 1], [0.75, 0.25, 0.25])  # what follows a child that was cut goes with it
    assert [a.tokens for a in answers(below, branching=1)] == [(5,)]


def test_the_probabilistic_rules_get_a_one_hot_support() -> None:
    assert [a.support for a in answers(FORK, depth=1, certain=True)] == [Support((5,), (1.0,))]


def test_no_tree_no_nodes() -> None:
    assert answers(Tree(match_len=0)) == []


@pytest.mark.parametrize(
    "tree",
    [
        Tree([5], [0], [1.0]),  # its own parent
        Tree([5, 6], [1, -1], [1.0, 1.0]),  # a parent that comes later
        Tree([5], [-2], [1.0]),
        Tree([5, 6], [-1], [1.0, 1.0]),
        Tree([5, 5], [-1, -1], [0.5, 0.5]),
        Tree([-1], [-1], [0.5]),
        Tree([5], [-1], [float("nan")]),
        Tree([5], [-1], [1.5]),
        Tree([5, 6], [-1, 0], [0.5, 0.75]),  # likelier than its parent
        Tree([5], [-1], [0.0]),
        Tree([5], [-1], [1.0], match_len=0),
    ],
)
def test_a_broken_tree_is_refused(tree: Tree) -> None:
    with pytest.raises(ValueError, match=r"^(token|its|it) "):
        answers(tree)


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(ConfigError) as caught:
        suffix_caches()
    assert str(caught.value) == "draft.kind 'suffix' needs the extra: pip install 'outrider[suffix]'"
