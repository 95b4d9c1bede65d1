"""Tokens follow p whatever state the controller is in: `make proof` in short (benchmarks/proof.py, section control)."""

from __future__ import annotations

import pytest
from mixed_path import PHASES, HalvingLookahead, MixedPath, fit_by_row, laws

from actors.settings import Rule

FALSE_ALARM = 1e-7
"""Of each case, by the chi-square law; rows expected to hold less than five of a token are left out."""


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize(("drafting", "alone", "slope"), [(2, 7, 0.03), (16, 0, 0.01), (1, 0, 0.2)])
def test_tokens_follow_the_target(rule: Rule, drafting: int, alone: int, slope: float) -> None:
    found = MixedPath(rule, drafting, alone, slope, seed=2).run(1500)
    assert found[1].sum() > 100
    assert fit_by_row(found, laws(rule), rule) > FALSE_ALARM


def test_every_phase_occurs() -> None:
    """8 drafting sequences beside 8, at a gain that is small but not nothing: probes and trials. 2 beside 7, where a
    token costs a tenth of a pass: off."""
    found = MixedPath("rejection", 8, 8, 0.06, seed=4).run(1500) + MixedPath("rejection", 2, 7, 0.1, seed=4).run(1500)
    assert dict(zip(PHASES, found.sum(axis=(0, 2, 3)) > 0, strict=True)) == dict.fromkeys(PHASES, True)
    assert fit_by_row(found, laws("rejection"), "rejection") > FALSE_ALARM


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_lookahead_that_halves_what_it_chose_is_noticed(rule: Rule) -> None:
    """A 0 is followed by a draft to be sure of, so that a drawn 0 has more verified behind it, and half of that is more
    than none: after another token the verified ones are 0 far more often than p has it, 0.3."""
    found = MixedPath(rule, 2, 7, 0.3, seed=2, controller=HalvingLookahead).run(4000)
    assert fit_by_row(found, laws(rule), rule) < FALSE_ALARM
    zero, other = found[1, :, 1].sum(axis=0)
    assert zero / (zero + other) > 0.4
