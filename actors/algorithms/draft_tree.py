"""Trees of draft tokens in arrays, and the walk that verifies them.

A tree is two arrays: `tokens`, and `parents`, the index of each node's parent; -1 is the committed prefix. A parent
stands before its children, so a node and all before it are closed under parents, and one scan from the front walks from
the root. No parents at all (`()`) stand for a path.

The target's own token at a node is a fact under the coupled rule and at temperature 0, whatever else is in the pass: it
is argmax(log p + g) after that node's prefix. So the walk needs no scheme for several drafts (compare SpecInfer, Miao
et al., ASPLOS 2024): at each node it takes the target's token, and goes on while that token is a child.

Pure: knows no rows, logits or settings; how a row's token is chosen is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Choices(Protocol):
    """The target's own token by row: 0 follows the committed prefix, i + 1 follows node i. May be made when asked."""

    def __getitem__(self, row: int, /) -> int: ...


def walk(tokens: Sequence[int], parents: Sequence[int], choices: Choices) -> list[int]:
    """The nodes that stand, from the root on. The token that follows them is the choice at the last one's row.

    Asks for the choices on the way only, in order, and for the one that follows. Of duplicate siblings the first is
    taken; nodes that come before their parents are never reached.
    """
    path: list[int] = []
    at, choice = -1, choices[0]
    for i, parent in enumerate(parents or range(-1, len(tokens) - 1)):
        if parent == at and tokens[i] == choice:
            path.append(i)
            at, choice = i, choices[i + 1]
    return path


def follow(tokens: Sequence[int], parents: Sequence[int], said: Sequence[int]) -> list[int]:
    """The nodes of a tree along `said`, from the root on, as far as they go."""
    path: list[int] = []
    at = -1
    for i, parent in enumerate(parents):
        if parent == at and len(path) < len(said) and tokens[i] == said[len(path)]:
            path.append(i)
            at = i
    return path


def is_path(parents: Sequence[int]) -> bool:
    """Is each node the child of the one before it?"""
    return all(parent == i - 1 for i, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Of each node; a child of the committed prefix has depth 1."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def reaches(confidences: Sequence[float], parents: Sequence[int]) -> list[float]:
    """The chance that the target comes to each node, from the chances given that it comes to the parent."""
    found: list[float] = []
    for confidence, parent in zip(confidences, parents, strict=True):
        found.append(confidence if parent < 0 else found[parent] * confidence)
    return found


def main_path(parents: Sequence[int], start: int = -1) -> list[int]:
    """The nodes below `start`, the first child of each."""
    found: list[int] = []
    at = start
    for i in range(start + 1, len(parents)):
        if parents[i] == at:
            found.append(i)
            at = i
    return found


def rejected(tokens: Sequence[int], parents: Sequence[int], accepted: Sequence[int]) -> tuple[int, ...]:
    """Draft tokens of the path (of a tree, the most likely one) past those that were accepted."""
    if not parents:
        return tuple(tokens[len(accepted) :])
    path = follow(tokens, parents, accepted)
    return tuple(tokens[node] for node in main_path(parents, path[-1] if path else -1))


def branch_chances(confidences: Sequence[float], parents: Sequence[int], path: Sequence[int]) -> list[float]:
    """At the root and at each node of `path` that has children: the chance that one of them comes true."""
    sums = dict.fromkeys((-1, *path), 0.0)
    for confidence, parent in zip(confidences, parents, strict=True):
        if parent in sums:
            sums[parent] += confidence
    return [min(1.0, total) for total in sums.values() if total > 0.0]


def branch_points(parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """Places of `path` whose node is not the first child of its parent."""
    found: list[int] = []
    for place, node in enumerate(path):
        if parents[node] in parents[:node]:
            found.append(place)
    return found
