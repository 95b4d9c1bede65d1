"""Trees through the real parts over emulated engines: answers are what the language says, whatever is verified."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from lossy_path import LossyPath, RandomLookahead

from actors.engines.emulated.engines import EmulatedDraft, EmulatedTarget
from actors.engines.emulated.language import Agreement, Language, expected_tokens
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.engines.protocol import DraftModel, Expand, ModelCard, Ranked, Row
from actors.errors import EngineError
from actors.messages import OpenSequence
from actors.settings import DraftSettings, LookaheadSettings, SamplingSettings, TargetSettings, TreeSettings

LANGUAGE = Language(vocabulary=512, eos_probability=0.02)
SETTINGS = TargetSettings(slots=16, context=256, queue=64, lookahead=LookaheadSettings(maximum=6))
TREE = TreeSettings(width=32, branching=4, depth=6, nodes=64, min_reach=0.0)


def nothing(_: float) -> None:
    """Time stands still."""


def target(settings: TargetSettings = SETTINGS) -> EmulatedTarget:
    return EmulatedTarget(TargetSpec(pass_ms=0, language=LANGUAGE), settings, clock=lambda: 0.0, sleep=nothing)


def draft() -> DraftModel:
    agreement = Agreement(acceptance=0.5, spread=0.2)
    return EmulatedDraft(
        DraftSpec(step_ms=0, language=LANGUAGE, agreement=agreement),
        DraftSettings(slots=16, tree=TREE),
        clock=lambda: 0.0,
        sleep=nothing,
    )


class Vandal:
    """Implements protocol.DraftModel: names nonsense, and sometimes the truth among it."""

    def __init__(self, inner: DraftModel, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng

    def card(self) -> ModelCard:
        return self._inner.card()

    def open(self, opening: OpenSequence) -> None:
        self._inner.open(opening)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self._inner.advance(sequence, tokens)

    def close(self, sequence: str) -> None:
        self._inner.close(sequence)

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        return [self._spoil(answer) for answer in self._inner.expand(requests)]

    def _spoil(self, answer: Ranked) -> Ranked:
        kind = self._rng.randrange(5)
        tokens = answer.tokens
        if kind == 0:
            tokens = (tokens[0],) * len(tokens)  # siblings that are the same
        elif kind == 1:
            tokens = (10**9, *tokens[1:])
        confidences = tuple(self._rng.random() for _ in tokens)  # in no order, and of no sum
        return Ranked(answer.sequence, answer.path, tokens, confidences)


def openings(count: int, temperature: float) -> list[OpenSequence]:
    sampling = SamplingSettings(temperature=temperature, max_tokens=60)
    return [OpenSequence(f"s{i}", (i, 7, i + 1), sampling, seed=i) for i in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vandal", [False, True])
def test_answers_are_what_the_language_says(temperature: float, vandal: bool) -> None:
    rng = random.Random(2)
    drafts = Vandal(draft(), rng) if vandal else draft()
    path = LossyPath(target(), drafts, SETTINGS, rng, tree=TREE, controller=lambda it, _: RandomLookahead(it, rng))
    asked = openings(48, temperature)
    for opening in asked:
        seed = None if temperature == 0 else opening.seed
        expected = expected_tokens(opening.prompt, 60, seed, LANGUAGE, opening.sampling)
        path_answers = path.run([opening])
        assert tuple(path_answers[opening.sequence].tokens) == expected
    assert path.branches > (20 if vandal else 100)
    assert path.proposed - path.accepted > 50


def test_what_is_proposed_counts_the_path_alone() -> None:
    """All that is verified is a tree of more nodes than any path of it; usage must not know of the others."""
    path = LossyPath(target(), draft(), SETTINGS, random.Random(3), tree=TREE, steps=(6,))
    path.run(openings(16, 0.0))
    assert path.branches > 20
    assert max(path.lengths) <= SETTINGS.lookahead.maximum


def test_settings_may_ask_for_paths_alone() -> None:
    settings = SETTINGS.model_copy(update={"lookahead": LookaheadSettings(maximum=6, tree=0)})
    path = LossyPath(target(settings), draft(), settings, random.Random(3), tree=TREE, steps=(6,))
    path.run(openings(16, 0.0))
    assert path.accepted > 50
    assert path.branches == 0


@pytest.mark.parametrize("parents", [(-1, -1), (1, -1), (0, -1), (-1,), (-2, -1)])
def test_an_emulated_target_refuses_what_is_no_tree(parents: tuple[int, ...]) -> None:
    """Duplicate siblings, a parent after its child, a node that is its own parent, too few parents, no such parent."""
    from actors.engines.protocol import Proposal

    model = target()
    model.attach(0, openings(1, 0.0)[0])
    row = Row(0, (0, 7, 1, 4, 4), 0, Proposal((4, 4), (0.5, 0.5), (), parents))
    with pytest.raises(EngineError, match="no tree"):
        model.forward([row])
