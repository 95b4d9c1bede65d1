"""Hidden states on their way through the real actors: engine, result, session, commit, draft."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import feature_models
from small_llamas import EOS, VOCABULARY, causal_lm, module, some_tokens

from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.engines.transformers.feature_draft import FeatureDraft
from actors.features import Features
from actors.messages import GenerationRequest, OpenSequence, VerificationResult
from actors.orchestrator.admission import Admission
from actors.orchestrator.session import Session
from actors.settings import DraftSettings, SamplingSettings, TargetSettings
from actors.text.emulated_codec import EmulatedCodec
from benchmarks.support.chaos_link import ChaosSettings

TARGET = TargetSettings(slots=4, context=128, lookahead={"mode": "fixed", "maximum": 4, "wait": "full"})
DRAFT = DraftSettings(slots=4, context=128)
CODEC = EmulatedCodec(VOCABULARY)


def requests(speculation: bool = True) -> list[GenerationRequest]:
    made = []
    for i in range(8):
        sampling = SamplingSettings(
            temperature=(0.0, 0.9)[i % 2], max_tokens=24, seed=i, ignore_eos=True, speculation=speculation
        )
        made.append(GenerationRequest(id=f"{speculation}-{i}", sampling=sampling, tokens=some_tokens(3 + 2 * i, i)))
    return made


def feature_draft() -> FeatureDraft:
    return feature_models.feature_draft(feature_models.feature_model(module()), DRAFT)


async def answers(start, draft, seen, **options) -> tuple[list[list[int]], list[list[int]]]:
    """With speculation and without, once the draft has seen something."""

    def target():
        model = feature_models.feature_model(module())
        return feature_models.feeding_target(causal_lm(eos=(EOS,)), model, TARGET)

    async with start(
        make_target=target,
        make_draft=lambda: draft,
        admission=Admission(CODEC, VOCABULARY, 128),
        target_settings=TARGET,
        draft_settings=DRAFT,
        **options,
    ) as local:
        while not local.orchestrator.status()["draft"]["replicas"]:  # without it there would be nothing to see
            await asyncio.sleep(0.01)
        plain = [await local.tokens(request) for request in requests(speculation=False)]
        speculated = await asyncio.gather(*(local.tokens(request) for request in requests()))
        while not seen():  # its mail may lie there for a while on a busy machine
            await asyncio.sleep(0.01)
        return list(speculated), plain


async def test_the_draft_is_told_and_the_answers_stay(start) -> None:
    draft = feature_draft()
    speculated, plain = await answers(start, draft, lambda: draft.told)
    assert speculated == plain
    assert draft.feature_counts() == {"features_read": float(draft.told), "features_dropped": 0.0}


async def test_over_a_bad_link_too(start, chaotic) -> None:
    """Commits, and what they carry, are delayed, swapped, lost and repeated on the way to the draft."""
    draft = feature_draft()
    chaos = ChaosSettings(delay_ms=2.0, jitter_ms=4.0, drop=0.1, duplicate=0.1, reorder=0.1, seed=1)
    speculated, plain = await answers(start, draft, lambda: draft.told, wrap_draft=chaotic(chaos))
    assert speculated == plain


class Listener:
    """A draft that proposes nothing, and has no use for hidden states."""

    def __init__(self) -> None:
        self.committed = 0

    def card(self) -> ModelCard:
        return ModelCard("listener", VOCABULARY, 128, 4)

    def open(self, opening: OpenSequence) -> None: ...

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self.committed += len(tokens)

    def close(self, sequence: str) -> None: ...

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        return [Ranked(request.sequence, request.path, (), ()) for request in requests]


async def test_a_draft_without_use_for_them_is_not_disturbed(start) -> None:
    draft = Listener()
    speculated, plain = await answers(start, draft, lambda: draft.committed)
    assert speculated == plain


def test_a_session_hands_them_on() -> None:
    sampling = SamplingSettings()
    opening = OpenSequence("s", (2,), sampling, seed=1)
    session = Session(GenerationRequest("s", sampling, tokens=(2,)), opening, [2], CODEC.stream((2,), ()))
    features = Features("print", 0, 2, b"\x00\x00\x00\x00")
    result = VerificationResult("s", 1, (5,), features=features)
    commit = session.commit(result)
    assert commit is not None
    assert commit.features is features
    assert result.features is None  # what waits for a slow client is small
