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
    failed: bool = False
    """A result of its target left a gap: nothing that it sends is taken any more."""
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
        return OpenSequence(opening.sequence, opening.prompt, opening.sampling, opening.seed, committed, opening.tenant)

    def commit(self, result: VerificationResult) -> CommitUpdate | None:
        """Take what the target in charge decided. Returns what the draft must hear; None if there is nothing new.

        A result that leaves a gap, which no honest target sends, ends the session with an EngineError.
        """
        if self.failed:
            return None
        committed = len(self.tokens)
        if result.position > committed:
            self.failed = True
            self.events.put_nowait(EngineError(f"a result at position {result.position}, committed are {committed}"))
            return None
        if result.error is not None:
            self.events.put_nowait(result.error)
            return None
        if result.position < committed or not (result.tokens or result.finish):
            return None  # a repeated message
        self.tokens.extend(result.tokens)
        if self.alternatives is not None:
            self.alternatives.extend(result.alternatives)
        self.ended = result.finish is not None
        features, result.features = result.features, None  # a reader that falls behind need not keep them
        self.events.put_nowait(result)
        return CommitUpdate(result.sequence, result.position, result.tokens, result.declined, features)

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

    def deliver(self, result: VerificationResult) -> Delta:
        """What the client sees of a result: cut at a stop string, with usage at the end."""
        pushed = self.text.push(self._shown(result))
        n = len(result.tokens) if pushed.stop is None else len(pushed.texts)
        finish, stop = result.finish, pushed.stop
        texts = list(pushed.texts)
        if stop is not None:
            finish = "stop"
        elif finish is not None:
            texts.append(self.text.flush())  # belongs to the last token, which may be a stop token without text
        self._count(result, n)
        self.prediction.follow(result.tokens[:n])
        origins, alternatives, margins = result.origins()[:n], result.alternatives[:n], result.margins[:n]
        return Delta(
            tokens=result.tokens[:n],
            texts=_fit(texts, n),
            origins=tuple(origins),
            alternatives=alternatives,
            margins=margins,
            finish=finish,
            stop=stop if stop is not None else self._stop_token(result),
            usage=self._usage() if finish is not None else None,
            rejected=self._rejected(result, n),
        )

    def _rejected(self, result: VerificationResult, n: int) -> tuple[tuple[int, ...], ...]:
        """Per delivered token the drafts in whose place it is: those of a result stand behind its last token."""
        if not (self.opening.sampling.margins and n):
            return ()
        return (((),) * (n - 1)) + ((result.rejected if n == len(result.tokens) else ()),)

    def _shown(self, result: VerificationResult) -> tuple[int, ...]:
        """Tokens whose text is part of the answer: a token that stops is committed but not shown."""
        return result.tokens[:-1] if result.finish == "stop" else result.tokens

    def _stop_token(self, result: VerificationResult) -> int | None:
        sampling = self.opening.sampling
        if result.finish == "stop" and result.tokens[-1] in sampling.stop_token_ids:
            return result.tokens[-1]
        return None

    def _count(self, result: VerificationResult, delivered: int) -> None:
        self.delivered += delivered
        self.proposed += result.proposed
        self.accepted += result.accepted
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
