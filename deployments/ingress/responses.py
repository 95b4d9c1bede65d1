"""Answers in OpenAI's words, put together from the orchestrator's deltas: whole, or as chunks of a stream.

Both come from the same steps, so that a stream and a whole answer cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.messages import Alternatives, Delta, Usage
from deployments.ingress.choice import Choice, Json, Step, finite
from deployments.ingress.schema import SpeculationOptions
from deployments.ingress.service import Codec, Served


class Answer(ABC):
    """One response with all its choices. `id_` is also the prefix of its sequences' names."""

    whole_kind = ""
    chunk_kind = ""

    def __init__(
        self, id_: str, created: int, served: Served, codec: Codec, choices: Sequence[Choice], options: Options
    ) -> None:
        self.id = id_
        self.choices = list(choices)
        self._codec = codec
        self._served = served
        self._options = options
        self._head: Json = {"id": id_, "created": created, "model": served.model_id}

    def take(self, index: int, delta: Delta) -> Step:
        """Add a delta to one choice. Raises EngineError."""
        return self.choices[index].take(delta, self._options.with_tokens)

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """The chunks of a stream that one delta makes: none while text is held back."""
        choice = self.choices[index]
        step = self.take(index, delta)
        parts = self._parts(choice, step)
        if parts and self._reports:
            parts[-1]["speculation"] = self._told(choice, step.tokens, step.finish is not None)
        return [self._chunk([part]) for part in parts]

    def whole(self) -> Json:
        """The complete response."""
        parts = [self._part(choice) for choice in self.choices]
        if self._reports:
            for part, choice in zip(parts, self.choices, strict=True):
                part["speculation"] = self._told(choice, choice.tokens, True)
        return {
            **self._head,
            "object": self.whole_kind,
            "choices": parts,
            "usage": self.usage(),
            "system_fingerprint": self._served.fingerprint,
        }

    def usage_chunk(self) -> list[Json]:
        """The last chunk of a stream whose client asked for it."""
        return [{**self._chunk([]), "usage": self.usage()}] if self._options.include_usage else []

    def usage(self) -> Json:
        """OpenAI's usage: candidates of one prompt count it once. Draft tokens are an extension of the details."""
        used = [choice.usage for choice in self.choices]
        prompt = sum(usage.prompt_tokens for usage in used[:: self._options.per_prompt])
        return usage_body(prompt, used + self._options.discarded, exact=self._served.exact)

    @property
    def _reports(self) -> bool:
        """Whether choices say how they came about: where clients ask, and always where answers are not the target's."""
        return self._options.reports or not self._served.exact

    def _chunk(self, parts: list[Json]) -> Json:
        chunk = {
            **self._head,
            "object": self.chunk_kind,
            "choices": parts,
            "system_fingerprint": self._served.fingerprint,
        }
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    def _told(self, choice: Choice, tokens: list[Json], complete: bool) -> Json:
        told: Json = {"tokens": tokens} if self._options.with_tokens else {}
        return {**self._speculation(choice), **told} if complete else told

    def _speculation(self, choice: Choice) -> Json:
        usage = choice.usage
        proposed, passes = usage.proposed_tokens, usage.passes
        return {
            "enabled": self._options.enabled,
            "rule": self._served.rule,
            "exact": self._served.exact,
            "passes": passes,
            "proposed_tokens": proposed,
            "accepted_tokens": usage.accepted_tokens,
            "acceptance_rate": usage.accepted_tokens / proposed if proposed else None,
            "acceptance_length": usage.completion_tokens / passes if passes else None,
        }

    @abstractmethod
    def _parts(self, choice: Choice, step: Step) -> list[Json]:
        """Entries of `choices` in the chunks of a stream."""

    @abstractmethod
    def _part(self, choice: Choice) -> Json:
        """Entry of `choices` in a complete response."""


@dataclass(slots=True)
class Options:
    """What a client asked to be told.

    per_prompt: candidates that share a prompt, of which the best `kept` are told; those `discarded` still count.
    """

    logprobs: int | None = None
    include_usage: bool = False
    speculation: SpeculationOptions | None = None
    per_prompt: int = 1
    kept: int = 1
    discarded: list[Usage] = field(default_factory=list)

    @property
    def enabled(self) -> bool:
        return self.speculation is None or self.speculation.enabled

    @property
    def reports(self) -> bool:
        return self.speculation is not None and (self.speculation.report or self.speculation.tokens)

    @property
    def with_tokens(self) -> bool:
        return self.speculation is not None and self.speculation.tokens


class CompletionAnswer(Answer):
    """text_completion."""

    whole_kind = chunk_kind = "text_completion"

    def whole(self) -> Json:
        """The complete response, with the best of the candidates."""
        if self._options.per_prompt > self._options.kept:
            self._keep_best(self._options.kept)
        return super().whole()

    def _keep_best(self, n: int) -> None:
        """Of the candidates of each prompt keep the n most likely per token; the others only count as usage."""
        kept: list[Choice] = []
        for start in range(0, len(self.choices), self._options.per_prompt):
            candidates = self.choices[start : start + self._options.per_prompt]
            candidates.sort(key=lambda choice: choice.logprob / max(1, len(choice.entries)), reverse=True)
            kept += candidates[:n]
            self._options.discarded += [choice.usage for choice in candidates[n:]]
        for index, choice in enumerate(kept):
            choice.index = index
        self.choices = kept
        self._options.per_prompt = n

    def _parts(self, choice: Choice, step: Step) -> list[Json]:
        if not (step.text or step.entries or step.tokens or step.finish):
            return []
        return [
            {
                "index": choice.index,
                "text": step.text,
                "logprobs": self._scores(choice, step.entries),
                "finish_reason": step.finish,
                **({"stop_reason": choice.stop} if step.finish else {}),
            }
        ]

    def _part(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._scores(choice, choice.entries),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
        }

    def _scores(self, choice: Choice, entries: list[tuple[int, Alternatives, str]]) -> Json | None:
        """OpenAI's older form: parallel lists, alternatives by text."""
        if self._options.logprobs is None:
            return None
        offsets = []
        for _, _, text in entries:
            offsets.append(choice.offset)
            choice.offset += len(text)
        return {
            "tokens": [self._named(token) for token, _, _ in entries],
            "token_logprobs": [finite(alternatives.logprob) for _, alternatives, _ in entries],
            "top_logprobs": [
                {self._named(token): finite(score) for token, score in [*alternatives.top, (chosen, own.logprob)]}
                for chosen, own, _ in entries
                for alternatives in [own]
            ]
            if self._options.logprobs
            else None,
            "text_offset": offsets,
        }

    def _named(self, token: int) -> str:
        """The token's text; bytes that are no text are written out, so that two of them stay apart."""
        piece = self._codec.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class ChatAnswer(Answer):
    """chat.completion."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _parts(self, choice: Choice, step: Step) -> list[Json]:
        parts = [self._delta(choice, {"role": "assistant", "content": ""})] if step.first else []
        if step.text or step.entries or step.tokens:
            part = self._delta(choice, {"content": step.text})
            part["logprobs"] = self._scores(step.entries)
            parts.append(part)
        if step.calls:
            told = len(choice.calls) - len(step.calls)
            calls = [call.as_openai(told + i) for i, call in enumerate(step.calls)]
            parts.append(self._delta(choice, {"tool_calls": calls}))
        if step.finish:
            parts.append({**self._delta(choice, {}), "finish_reason": step.finish, "stop_reason": choice.stop})
        return parts

    def _part(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [call.as_openai() for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._scores(choice.entries),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
        }

    def _delta(self, choice: Choice, delta: Json) -> Json:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _scores(self, entries: list[tuple[int, Alternatives, str]]) -> Json | None:
        if self._options.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._score(token, own.logprob),
                    "top_logprobs": [self._score(other, score) for other, score in own.top],
                }
                for token, own, _ in entries
            ],
            "refusal": None,
        }

    def _score(self, token: int, logprob: float) -> Json:
        piece = self._codec.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(piece)}


def usage_body(prompt_tokens: int, used: Sequence[Usage], *, exact: bool = True) -> Json:
    """OpenAI's usage object over several choices; what a relaxed rule let through is marked as such."""
    completion = sum(usage.completion_tokens for usage in used)
    accepted = sum(usage.accepted_tokens for usage in used)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for usage in used),
            "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for usage in used),
            "accepted_draft_tokens": accepted,
            "rejected_draft_tokens": sum(usage.proposed_tokens for usage in used) - accepted,
            **({} if exact else {"relaxed": True}),
        },
    }
