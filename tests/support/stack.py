"""The whole path in this process: HTTP door, orchestrator, target and draft actors, and rigged models at the end.

A rigged target says a chosen sequence of ids whatever the prompt; a rigged draft proposes exactly that (a twin) or
never (a foe). Nothing else is a stand-in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import httpx

from actors.draft.actor import DraftActor
from actors.engines.protocol import DraftModel, Expand, ModelCard, Ranked, Row, TargetModel
from actors.messages import Alternatives, OpenSequence, VerificationResult
from actors.orchestrator.admission import Admission
from actors.orchestrator.orchestrator import Orchestrator
from actors.orchestrator.replica_pool import StaticDirectory
from actors.settings import (
    DraftSettings,
    LookaheadSettings,
    OrchestratorSettings,
    SamplingSettings,
    TargetSettings,
    TreeSettings,
)
from actors.target.actor import TargetActor
from actors.telemetry import MemoryRecorder
from actors.text.codec import TextCodec
from actors.transport.links import LocalPeer
from deployments.ingress.http_app import http_app
from deployments.ingress.service import Served

Character = Literal["twin", "foe"]
EOS = 0


@dataclass
class RiggedTarget:
    """Says `script`, then EOS for ever. Below min_tokens, or with ignore_eos, EOS is not in its vocabulary."""

    script: Sequence[int]
    vocabulary: int
    settings: TargetSettings
    slots: dict[int, tuple[OpenSequence, list[int]]] = field(default_factory=dict)

    def card(self) -> ModelCard:
        return ModelCard("rigged", self.vocabulary, self.settings.context, self.settings.slots, (EOS,))

    def attach(self, slot: int, opening: OpenSequence) -> None:
        self.slots[slot] = (opening, list(opening.committed))

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        return [self._decide(row) if row.decide else None for row in rows]

    def _decide(self, row: Row) -> VerificationResult:
        opening, output = self.slots[row.slot]
        tokens: list[int] = []
        for draft in [*row.proposal.tokens, None]:
            token = said(self.script, len(output) + len(tokens), opening.sampling)
            tokens.append(token)
            if token != draft:
                break
        views = tuple(self._view(token, opening.sampling.logprobs) for token in tokens)
        margins = (1.0,) * len(tokens) if opening.sampling.margins else ()
        return VerificationResult(
            opening.sequence,
            len(opening.prompt) + len(output),
            tuple(tokens),
            len(row.proposal.tokens),
            len(tokens) - 1,
            alternatives=views if opening.sampling.logprobs is not None else (),
            margins=margins,
        )

    @staticmethod
    def _view(token: int, wanted: int | None) -> Alternatives:
        return Alternatives(-token / 1000, tuple((token + i, -token / 1000 - i) for i in range(wanted or 0)))

    def record(self, slot: int, tokens: Sequence[int]) -> None:
        self.slots[slot][1].extend(tokens)

    def detach(self, slot: int) -> None:
        self.slots.pop(slot, None)


def said(script: Sequence[int], place: int, sampling: SamplingSettings) -> int:
    """The rigged target's token at a place of its answer."""
    token = script[place] if place < len(script) else EOS
    if token == EOS and (sampling.ignore_eos or place < sampling.min_tokens):
        return 2 + place % 50  # the next best
    return token


@dataclass
class RiggedDraft:
    """Proposes what the target will say, or never that."""

    script: Sequence[int]
    vocabulary: int
    settings: DraftSettings
    character: Character
    sessions: dict[str, tuple[OpenSequence, int]] = field(default_factory=dict)

    def card(self) -> ModelCard:
        return ModelCard("rigged", self.vocabulary, self.settings.context, self.settings.slots, (EOS,))

    def open(self, opening: OpenSequence) -> None:
        self.sessions[opening.sequence] = (opening, len(opening.committed))

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        return [self._rank(request) for request in requests]

    def _rank(self, request: Expand) -> Ranked:
        opening, length = self.sessions[request.sequence]
        token = said(self.script, length + len(request.path), opening.sampling)
        if self.character == "foe":
            token = (token + 1) % self.vocabulary
        return Ranked(request.sequence, request.path, (token,), (0.9,))

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        opening, length = self.sessions[sequence]
        self.sessions[sequence] = (opening, length + len(tokens))

    def close(self, sequence: str) -> None:
        self.sessions.pop(sequence, None)


@dataclass
class Stack:
    """A running stack: a client of its door, and what tests look into."""

    http: httpx.AsyncClient
    orchestrator: Orchestrator
    recorder: MemoryRecorder


class _Local:
    """The orchestrator of this process as the door's service."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.generate = orchestrator.generate
        self._orchestrator = orchestrator

    async def status(self) -> dict[str, object]:
        return self._orchestrator.status()

    async def ready(self) -> bool:
        return self._orchestrator.ready()


@asynccontextmanager
async def stack(
    codec: TextCodec,
    script: Sequence[int],
    character: Character | None = "twin",
    lookahead: int = 4,
    slots: int = 8,
    queue: int = 256,
    context: int = 256,
    make_target: Callable[[TargetSettings], TargetModel] | None = None,
    make_draft: Callable[[DraftSettings], DraftModel] | None = None,
) -> AsyncIterator[Stack]:
    """Every pass waits for the draft, so that blocks are as long as `lookahead` says.

    make_target, make_draft: real models in place of the rigged ones.
    """
    ahead = LookaheadSettings(mode="fixed", maximum=lookahead, wait="bounded", max_wait_ms=1000)
    target_settings = TargetSettings(slots=slots, queue=queue, context=context, lookahead=ahead)
    draft_settings = DraftSettings(slots=2 * slots, context=context, tree=TreeSettings(branching=1))
    vocabulary = codec.vocabulary
    recorder = MemoryRecorder()

    def model() -> TargetModel:
        return make_target(target_settings) if make_target else RiggedTarget(script, vocabulary, target_settings)

    target = TargetActor("t", model, target_settings, recorder)
    actors: list[TargetActor | DraftActor] = [target]
    drafts: dict[str, LocalPeer] = {}
    if character is not None:
        kind = character

        def guesser() -> DraftModel:
            return make_draft(draft_settings) if make_draft else RiggedDraft(script, vocabulary, draft_settings, kind)

        draft = DraftActor("d", guesser, draft_settings, recorder)
        actors.append(draft)
        drafts["d"] = LocalPeer(draft)
    for actor in actors:
        actor.start()
    orchestrator = Orchestrator(
        targets=StaticDirectory({"t": LocalPeer(target)}),
        drafts=StaticDirectory(dict(drafts)),
        admission=Admission(codec, vocabulary, context),
        settings=OrchestratorSettings(discovery_period_s=0.02),
        recorder=recorder,
    )
    await orchestrator.start()
    try:
        for _ in range(1000):
            status = orchestrator.status()
            if status["target"]["replicas"] and len(status["draft"]["replicas"]) == len(drafts):
                break
            await asyncio.sleep(0.01)
        app = http_app(_Local(orchestrator), codec, Served("rigged", context))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://stack", timeout=60) as http:
            yield Stack(http, orchestrator, recorder)
    finally:
        await orchestrator.stop()
        await asyncio.gather(*(actor.stop() for actor in actors))
