"""Trees of draft tokens in arrays: the walk against a scalar one over nested dictionaries, and the sums about trees."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from actors.algorithms.draft_tree import (
    branch_chances,
    branch_points,
    depths,
    follow,
    is_path,
    main_path,
    reaches,
    rejected,
    walk,
)
from actors.algorithms.tree_selection import LEAST_REACH, rank_nodes
from actors.messages import EMPTY_PREFIX, extend_key, prefix_key

# (1 (2 (4) 3)) 5: two children of the root, one of which has two, the first of these has one.
TOKENS = (1, 5, 2, 3, 4)
PARENTS = (-1, -1, 0, 0, 2)


class Script:
    """Choices that are fixed by row; remembers which were asked for."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices, self.asked = choices, list[int]()

    def __getitem__(self, row: int, /) -> int:
        self.asked.append(row)
        return self.choices[row]


@pytest.mark.parametrize(
    ("choices", "path", "asked"),
    [
        ((1, 2, 9, 4, 9, 8), [0, 2, 4], [0, 1, 3, 5]),  # all the way down, then a bonus
        ((1, 3, 9, 9, 7, 9), [0, 3], [0, 1, 4]),  # the second child of the first
        ((5, 9, 7, 9, 9, 9), [1], [0, 2]),
        ((8, 1, 1, 1, 1, 1), [], [0]),  # nobody named it
    ],
)
def test_the_walk_takes_the_targets_own_token_at_each_node(
    choices: tuple[int, ...], path: list[int], asked: list[int]
) -> None:
    script = Script(choices)
    assert walk(TOKENS, PARENTS, script) == path
    assert script.asked == asked


def test_without_parents_a_walk_follows_a_path() -> None:
    assert walk((7, 8, 9), (), Script((7, 8, 1, 9))) == [0, 1]
    assert walk((7, 8), (), Script((7, 8, 3))) == [0, 1]
    assert walk((), (), Script((3,))) == []


def random_tree(rng: random.Random, size: int, vocabulary: int) -> tuple[list[int], list[int]]:
    """Parents before children, siblings all different."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < size:
        parent, token = rng.randrange(-1, len(tokens)), rng.randrange(vocabulary)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def test_the_walk_agrees_with_one_over_nested_dictionaries() -> None:
    rng = random.Random(5)
    longest = 0
    for _ in range(500):
        tokens, parents = random_tree(rng, rng.randrange(1, 20), 3)
        choices = [rng.randrange(3) for _ in range(len(tokens) + 1)]
        children = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        expected, at = list[int](), -1
        while (child := children.get((at, choices[at + 1]))) is not None:
            expected.append(child)
            at = child
        assert walk(tokens, parents, Script(choices)) == expected
        longest = max(longest, len(expected))
    assert longest >= 4  # trees were gone down


def test_what_is_no_tree_is_walked_without_harm() -> None:
    """Duplicate siblings: the first stands. A node before its parent, or its own parent, is never reached."""
    assert walk((1, 1), (-1, -1), Script((1, 9, 9))) == [0]
    assert walk((2, 1), (1, -1), Script((1, 9, 2))) == [1]
    assert walk((1, 2), (0, -1), Script((1, 9, 9))) == []


def test_sums_over_a_tree() -> None:
    assert follow(TOKENS, PARENTS, (1, 2, 4, 9)) == [0, 2, 4]
    assert follow(TOKENS, PARENTS, (1, 2)) == [0, 2]
    assert follow(TOKENS, PARENTS, (9, 1)) == []
    assert rejected(TOKENS, PARENTS, (1,)) == (2, 4)
    assert rejected(TOKENS, PARENTS, ()) == (1, 2, 4)
    assert rejected(TOKENS, PARENTS, (1, 3)) == ()
    assert rejected((1, 2, 3), (), (1,)) == (2, 3)
    assert depths(PARENTS) == [1, 1, 2, 2, 3]
    assert reaches((0.5, 0.25, 0.5, 0.25, 0.5), PARENTS) == [0.5, 0.25, 0.25, 0.125, 0.125]
    assert main_path(PARENTS) == [0, 2, 4]
    assert main_path(PARENTS, 2) == [4]
    assert main_path(PARENTS, 4) == []
    assert is_path((-1, 0, 1))
    assert is_path(())
    assert not is_path(PARENTS)
    # At the root .5 + .25, under node 0 .5 + .25, nothing under node 3.
    assert branch_chances((0.5, 0.25, 0.5, 0.25, 0.5), PARENTS, [0, 3]) == [0.75, 0.75]
    assert branch_points(PARENTS, [0, 3]) == [1]
    assert branch_points(PARENTS, [1]) == [0]
    assert branch_points(PARENTS, [0, 2, 4]) == []


def named(tree: dict[tuple[int, ...], list[tuple[float, int]]]) -> dict[tuple[int, int], list[tuple[float, int]]]:
    return {(len(path), prefix_key(path)): children for path, children in tree.items()}


def test_nodes_come_by_reach() -> None:
    """Reaches: (1,) .6, (2,) .3; under (1,): .36 and .06; under (2,): .27."""
    tree = named({(): [(0.6, 1), (0.3, 2)], (1,): [(0.6, 3), (0.1, 4)], (2,): [(0.9, 5)]})
    found = rank_nodes(EMPTY_PREFIX, lambda n, key: tree.get((n, key), ()), most=5, depth=8)
    assert found.tokens == (1, 3, 2, 5, 4)
    assert found.parents == (-1, 0, -1, 2, 0)
    assert found.confidences == (0.6, 0.6, 0.3, 0.9, 0.1)
    assert found.cut(2).parents == ()  # what is left is a path
    assert found.cut(3).parents == (-1, 0, -1)


def test_a_set_of_nodes_is_bounded_in_size_depth_and_reach() -> None:
    tree = named({(): [(0.6, 1), (LEAST_REACH / 2, 2)], (1,): [(0.6, 3)], (1, 3): [(0.9, 4)]})

    def children(n: int, key: int) -> list[tuple[float, int]]:
        return tree.get((n, key), [])

    assert rank_nodes(EMPTY_PREFIX, children, most=9, depth=2).tokens == (1, 3)
    assert rank_nodes(EMPTY_PREFIX, children, most=1, depth=9).tokens == (1,)
    assert rank_nodes(EMPTY_PREFIX, children, most=9, depth=9).tokens == (1, 3, 4)
    assert rank_nodes(EMPTY_PREFIX, children, most=0, depth=9).tokens == ()
    assert rank_nodes(EMPTY_PREFIX, children, most=9, depth=0).tokens == ()


def test_the_first_n_nodes_are_the_best_set_closed_under_parents() -> None:
    """Against every closed set of n nodes of small random trees."""
    rng = random.Random(7)
    for _ in range(60):
        tokens, parents = random_tree(rng, 8, 4)
        chances = [rng.choice((0.1, 0.3, 0.5, 0.9)) for _ in tokens]
        keys = [EMPTY_PREFIX]
        for token, parent in zip(tokens, parents, strict=True):
            keys.append(extend_key(keys[parent + 1], token))
        tree: dict[int, list[tuple[float, int]]] = {}
        for token, parent, chance in zip(tokens, parents, chances, strict=True):
            tree.setdefault(keys[parent + 1], []).append((chance, token))
        ranked = {key: sorted(children, reverse=True) for key, children in tree.items()}
        found = rank_nodes(EMPTY_PREFIX, lambda _, key, it=ranked: it.get(key, ()), most=4, depth=9)
        total = sum(reaches(found.confidences, found.parents or range(-1, len(found.tokens) - 1)))
        reach = reaches(chances, parents)
        sets = itertools.combinations(range(len(tokens)), 4)
        closed = [chosen for chosen in sets if all(parents[i] in (-1, *chosen) for i in chosen)]
        assert total == pytest.approx(max(sum(reach[i] for i in chosen) for chosen in closed))
