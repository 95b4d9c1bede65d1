"""One sequence as the orchestrator follows it: what is committed, what was said of it, and who works on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from actors.errors import EngineError
from actors.messages import (
    Alternatives,
    CommitUpdate,
    Delta,
    DraftMessage,
    GenerationRequest,
    OpenSequence,
    ProposalBatch,
    TargetMessage,
    Usage,
    VerificationBatch,
    VerificationResult,
)
from actors.text.codec import TextStream
from actors.text.predicted_outputs import PredictionTally
from actors.transport.connection import Connection

TargetConnection = Connection[TargetMessage, VerificationBatch]
DraftConnection = Connection[DraftMessage, ProposalBatch]


@dataclass(slots=True, eq=False)
class Session:
    """State of one request. `tokens` is the prompt and everything committed; it only grows."""

    request: GenerationRequest
    opening: OpenSequence
    tokens: list[int]
    text: TextStream
    events: asyncio.Queue[VerificationResult | Exception] = field(default_factory=asyncio.Queue)
    target: TargetConnection | None = None
    draft: DraftConnection | None = None
    moves: int = 0
    """How often the sequence went on at another target."""
    ended: bool = False
    """The target has committed the last token."""
    delivered: int = 0
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    alternatives: list[Alternatives] | None = None
    """Of each token, gathered where answers are recorded."""
    prediction: PredictionTally = field(init=False)

    def __post_init__(self) -> None:
        self.prediction = PredictionTally(self.opening.sampling.prediction)
        self.prediction.follow(self.request.committed)

    @property
    def prompt_tokens(self) -> int:
        return len(self.opening.prompt)

    def resumed(self) -> OpenSequence:
        """An opening from what is committed now."""
        opening = self.opening
        committed = tuple(self.tokens[self.prompt_tokens :])
        return OpenSequence(opening.sequence, opening.prompt, opening.sampling, opening.seed, committed)

    def commit(self, verdict: VerificationResult) -> CommitUpdate | None:
        """Take a verdict of the target in charge. Returns what the draft must hear; None if there is nothing new.

        Raises EngineError when the verdict leaves a gap, which no honest target does.
        """
        if verdict.position > len(self.tokens):
            raise EngineError(f"verdict at position {verdict.position}, committed are {len(self.tokens)}")
        if verdict.error is not None:
            self.events.put_nowait(verdict.error)
            return None
        if verdict.position < len(self.tokens) or not (verdict.tokens or verdict.finish):
            return None  # a repeated message
        self.tokens.extend(verdict.tokens)
        if self.alternatives is not None:
            self.alternatives.extend(verdict.alternatives)
        self.ended = verdict.finish is not None
        self.events.put_nowait(verdict)
        return CommitUpdate(verdict.sequence, verdict.position, verdict.tokens, verdict.declined)

    async def step(self) -> Delta:
        """The next step of the answer: all that was decided since the last one.

        A reader that keeps up gets every pass by itself; one that falls behind gets fewer and larger steps instead of
        older ones. Raises what ended the sequence.
        """
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        delta = self.deliver(event)
        while delta.finish is None and not self.events.empty():
            event = self.events.get_nowait()
            if isinstance(event, Exception):
                self.events.put_nowait(event)  # after what was decided before it
                break
            delta = delta.then(self.deliver(event))
        return delta

    def deliver(self, verdict: VerificationResult) -> Delta:
        """What the client sees of a verdict: cut at a stop string, with usage at the end."""
        pushed = self.text.push(self._shown(verdict))
        n = len(verdict.tokens) if pushed.stop is None else len(pushed.texts)
        finish, stop = verdict.finish, pushed.stop
        texts = list(pushed.texts)
        if stop is not None:
            finish = "stop"
        elif finish is not None:
            texts.append(self.text.flush())  # belongs to the last token, which may be a stop token without text
        self._count(verdict, n)
        self.prediction.follow(verdict.tokens[:n])
        origins, alternatives, margins = verdict.origins()[:n], verdict.alternatives[:n], verdict.margins[:n]
        return Delta(
            tokens=verdict.tokens[:n],
            texts=_fit(texts, n),
            origins=tuple(origins),
            alternatives=alternatives,
            margins=margins,
            finish=finish,
            stop=stop if stop is not None else self._stop_token(verdict),
            usage=self._usage() if finish is not None else None,
        )

    def _shown(self, verdict: VerificationResult) -> tuple[int, ...]:
        """Tokens whose text is part of the answer: a token that stops is committed but not shown."""
        return verdict.tokens[:-1] if verdict.finish == "stop" else verdict.tokens

    def _stop_token(self, verdict: VerificationResult) -> int | None:
        sampling = self.opening.sampling
        if verdict.finish == "stop" and verdict.tokens[-1] in sampling.stop_token_ids:
            return verdict.tokens[-1]
        return None

    def _count(self, verdict: VerificationResult, delivered: int) -> None:
        self.delivered += delivered
        self.proposed += verdict.proposed
        self.accepted += verdict.accepted
        self.passes += 1

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.request.committed) + self.delivered,
            proposed_tokens=self.proposed,
            accepted_tokens=self.accepted,
            passes=self.passes,
            accepted_prediction_tokens=self.prediction.accepted,
            rejected_prediction_tokens=self.prediction.rejected,
        )


def _fit(texts: list[str], n: int) -> tuple[str, ...]:
    """One text per token: what is over goes to the last one."""
    if n == 0:
        return tuple(texts)
    padded = [*texts[:n], *[""] * (n - len(texts))]
    padded[-1] += "".join(texts[n:])
    return tuple(padded)
