"""A draft on vLLM, through its public API alone: each prefix to be continued is a request for one token.

vLLM's prefix cache makes going back free and lets the branches of an outcome tree share what they have in common, so
there is nothing to keep in step with. What comes back is the best ids of the next token with their log-probabilities;
sampling settings and the shared noise are applied to those here, as any draft does. Ids beyond them are never
proposed, which costs acceptance and no exactness.

Where it pays: drafts that are models of their own on a GPU, quantised ones, and many sequences at once. A step costs
vLLM's scheduling (about a millisecond) on top of the model, so a draft of a few layers is better off with the
transformers engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actors.algorithms.drafting import DraftRow, rank_children
from actors.engines.opening_checks import check_opening
from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.errors import ConfigError, OverloadedError, PromptTooLongError
from actors.messages import OpenSequence, prefix_key
from actors.settings import DraftSettings

Scored = Sequence[tuple[int, float]]
"""Token ids with their log-probabilities, best first."""


class NextTokens(Protocol):
    """What a vLLM draft needs of a model."""

    def best(self, prefixes: Sequence[Sequence[int]]) -> list[Scored]:
        """The best ids to follow each prefix, all prefixes as one batch."""


@dataclass(slots=True, eq=False)
class _Session:
    opening: OpenSequence
    tokens: list[int]
    key: int

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.opening.prompt) :]


class VllmDraft:
    """Implements protocol.DraftModel."""

    def __init__(self, model: NextTokens, card: ModelCard, settings: DraftSettings) -> None:
        self._model, self._card, self._settings = model, card, settings
        self._sessions: dict[str, _Session] = {}

    def card(self) -> ModelCard:
        return self._card

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence. Raises OverloadedError when settings.slots are held, PromptError for a prompt that fails."""
        self.close(opening.sequence)
        check_opening(opening, self._card.vocabulary)
        tokens = [*opening.prompt, *opening.committed]
        if len(tokens) > self._settings.context:
            raise PromptTooLongError(f"{len(tokens)} tokens do not fit the draft's context of {self._settings.context}")
        if len(self._sessions) >= self._settings.slots:
            raise OverloadedError(f"all {self._settings.slots} draft slots are taken")
        self._sessions[opening.sequence] = _Session(opening, tokens, prefix_key(tokens))

    def close(self, sequence: str) -> None:
        """Forget a sequence. Unknown ones are ignored."""
        self._sessions.pop(sequence, None)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed past the committed prefix."""
        session = self._sessions[sequence]
        session.tokens.extend(tokens)
        session.key = prefix_key(tokens, session.key)

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """Rank the children of all requested nodes in one batch. At the end of the context nothing can follow."""
        fits = [r for r in requests if len(self._sessions[r.sequence].tokens) + len(r.path) < self._settings.context]
        ended = [Ranked(r.sequence, r.path, (), ()) for r in requests if r not in fits]
        if not fits:
            return ended
        found = self._model.best([[*self._sessions[r.sequence].tokens, *r.path] for r in fits])
        return ended + [self._rank(request, scored) for request, scored in zip(fits, found, strict=True)]

    def _rank(self, request: Expand, scored: Scored) -> Ranked:
        settings = self._settings
        [row] = rank_children(
            torch.tensor([[value for _, value in scored]], dtype=torch.float64),
            [self._row(request)],
            branching=settings.tree.branching,
            support=settings.support,
            rule=settings.rule,
            vocabulary=torch.tensor([token for token, _ in scored]),
        )
        # What is not among the ids may be what comes; under the probabilistic rules q is what was drawn from.
        known = math.fsum(math.exp(value) for _, value in scored) if row.support is None else 1.0
        confidences = tuple(confidence * min(known, 1.0) for confidence in row.confidences)
        return Ranked(request.sequence, request.path, row.tokens, confidences, row.support)

    def _row(self, request: Expand) -> DraftRow:
        session = self._sessions[request.sequence]
        opening, output = session.opening, session.output
        return DraftRow(
            sampling=opening.sampling,
            seed=opening.seed,
            position=len(session.tokens) + len(request.path),
            prefix=prefix_key(request.path, session.key),
            prompt=opening.prompt,
            output=[*output, *request.path],
            generated=len(output) + len(request.path),
            eos=self._card.eos,
        )


class VllmNextTokens:
    """vLLM's LLM, in this process: it ends with it.

    count: ids per prefix. arguments: vLLM's own. Raises ConfigError when vLLM cannot serve the checkpoint.
    """

    def __init__(self, folder: str, dtype: str, settings: DraftSettings, arguments: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # see vllm_engine
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

        shared = settings.rule in ("coupled", "typical")
        self.count = max(settings.tree.branching, 32 if shared else settings.support)
        chosen: dict[str, Any] = {
            "model": folder,
            "dtype": dtype,
            "max_model_len": settings.context,
            "max_num_seqs": max(settings.slots, settings.tree.width),
            "max_logprobs": self.count,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
        }
        if current_platform.is_cpu():
            chosen |= {"block_size": _CPU_BLOCK, "kv_cache_memory_bytes": 1 << 30}
        try:
            self._llm = LLM(**chosen | arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(f"vLLM cannot serve the draft {folder}: {reason}", "draft") from error
        self.vocabulary = int(self._llm.model_config.get_vocab_size())
        self._params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=self.count, detokenize=False)

    def best(self, prefixes: Sequence[Sequence[int]]) -> list[Scored]:
        """The `count` best ids to follow each prefix."""
        prompts = [{"prompt_token_ids": list(prefix)} for prefix in prefixes]
        answers = self._llm.generate(prompts, self._params, use_tqdm=False)
        return [_scored(answer.outputs[0].logprobs[0]) for answer in answers]


_CPU_BLOCK = 32
"""Positions per block of the cache: prefixes are shared in whole blocks, and vLLM's own choice on a CPU is 128."""


def _scored(line: dict[int, Any]) -> Scored:
    return sorted(((token, entry.logprob) for token, entry in line.items()), key=lambda pair: -pair[1])
