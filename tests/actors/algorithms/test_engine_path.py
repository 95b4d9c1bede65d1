"""The law of whole answers through forest, mailbox, lookahead controller, scheduler and rules, with lossy links."""

from __future__ import annotations

import pytest
from engine_path import EnginePath, answer_law, counts, fit, law_under
from lossy_path import Trouble
from toy_models import Request, ToyModel, plain, tokens_of

from actors.settings import LookaheadSettings, Rule, SamplingSettings

FALSE_ALARM = 1e-7
TARGET = ToyModel(3, seed=1, scale=1.2, memory=2)
DRAFT = ToyModel(3, seed=2, scale=2.5, memory=2)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("slope", [0.0, 0.03])
def test_answers_follow_the_target(rule: Rule, slope: float) -> None:
    """Chi-square of 300 answers of 4 tokens, rare ones together. Slope 0 verifies all there is, with 0.03 the
    controller cuts. False alarm of a case: 1e-7."""
    path = EnginePath(TARGET, DRAFT, rule, SamplingSettings(), length=4, seed=3, slope=slope)
    answers = path.run(300)
    law = answer_law(TARGET, 1.0, 4)
    assert path.accepted > 30
    assert path.proposed > path.accepted
    assert fit(counts(answers, 3, 4), law) > FALSE_ALARM


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_answers_follow_the_target_under_settings(rule: Rule) -> None:
    """Penalties of the history, bias and filters, which the draft knows in part only. False alarm of a case: 1e-7."""
    settings = SamplingSettings(
        temperature=1.3,
        top_p=0.9,
        min_p=0.05,
        frequency_penalty=0.6,
        presence_penalty=-0.4,
        repetition_penalty=1.4,
        logit_bias={1: 0.7},
        bad_words=((2, 2),),
    )
    path = EnginePath(TARGET, DRAFT, rule, settings, length=4, seed=5, slope=0.02)
    found = counts(path.run(300), 3, 4)
    law = law_under(TARGET, settings, 4)
    assert path.accepted > 30
    assert not found[law == 0].any()
    possible = law > 0
    assert fit(found[possible], law[possible]) > FALSE_ALARM


def test_coupled_answers_are_those_of_plain_decoding() -> None:
    """Whatever the drafts, the lookahead and the losses: token for token, from the seed alone."""
    sampling = SamplingSettings(temperature=0.9, top_p=0.95, frequency_penalty=0.3)
    model = ToyModel(8, seed=4)
    for trouble in (Trouble(0, 0, 0, 0), Trouble(0.5, 0.5, 4, 0.5)):
        path = EnginePath(
            model,
            ToyModel(8, seed=4, scale=1.5),
            "coupled",
            sampling,
            length=9,
            seed=6,
            trouble=trouble,
            lookahead=LookaheadSettings(mode="fixed", maximum=3),
        )
        answers = path.run(30)
        assert path.accepted > 0
        for answer, seed in zip(answers, path.seeds, strict=True):
            reference = tokens_of(plain(Request(model, sampling, seed, [0]), 9))
            assert list(answer) == reference
