"""Near-ties are counted, and never hide a difference."""

from __future__ import annotations

import pytest

from actors.text.answer_comparison import Comparison, Reference, first_difference


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_first_difference(one, other, place) -> None:
    assert first_difference(one, other) == place


def test_tally() -> None:
    tally = Comparison(tolerance=1e-3)
    tally.add("same", Reference([1, 2, 3], [1, 1, 1]), [1, 2, 3])
    tally.add("tie", Reference([1, 2, 3], [1, 9e-4, 1]), [1, 5, 9])
    assert tally.same
    tally.add("wide", Reference([1, 2, 3], [9e-4, 2e-3, 9e-4]), [1, 5, 3])
    tally.add("short", Reference([1, 2, 3], [1, 1, 1]), [1, 2])
    tally.add("unknown", Reference([4]), [5])
    assert (tally.identical, tally.ties, tally.tokens) == (1, 1, 3 + 1 + 1 + 2 + 0)
    assert not tally.same
    assert [line.split(":")[0] for line in tally.different] == ["wide", "short", "unknown"]
    assert "1 of 5 answers identical, 1 part at a near-tie, 3 DIFFER" in str(tally)
