"""Sampling a target's answers, many side by side; an answer that ends makes room for the next prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import SlotRow
from cluster.distillation.prompts import Ids
from cluster.distillation.store import Sample


class Source(Protocol):
    """Whoever can answer as the target does."""

    def sample(
        self,
        prompts: Sequence[tuple[Ids, float]],
        generator: torch.Generator,
        go_on: Callable[[int], bool] = lambda tokens: True,
    ) -> list[Sample]:
        """Answers to (prompt, temperature) pairs, in their order. The same generator gives the same answers.

        go_on: told now and then how many tokens there are. When it returns False, answers under way are cut short,
        and those not yet begun are left out; at least one token comes back.
        """
        ...


@dataclass(slots=True)
class _Answer:
    number: int
    prompt: Ids
    temperature: float
    slot: int
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    top_ids: list[Tensor] = field(default_factory=list)
    top_logp: list[Tensor] = field(default_factory=list)

    def next_tokens(self, most: int) -> Sequence[int]:
        """What goes into the next pass."""
        if self.tokens:
            return self.tokens[-1:]
        return self.prompt[self.cached : self.cached + most]

    def sample(self) -> Sample:
        return Sample(
            torch.tensor(self.prompt, dtype=torch.int32),
            torch.tensor(self.tokens, dtype=torch.int32),
            torch.stack(self.top_ids),
            torch.stack(self.top_logp),
            self.temperature,
        )


class Sampler:
    """Answers by the embedded engine. Memory is `slots` times `context` cached positions, whatever is asked.

    top: log-probabilities kept per position; a token is drawn from the `pool` best (greedy: the best).
    """

    def __init__(
        self, model: CausalLM, *, slots: int, context: int, answer: int, top: int, prefill: int = 512, pool: int = 64
    ) -> None:
        self._model, self._slots, self._context, self._longest = model, slots, context, answer
        self._top, self._prefill = min(top, model.vocabulary_size), prefill
        self._pool = min(max(pool, top), model.vocabulary_size)
        self._cache = model.cache(slots=slots, context=context)

    def sample(
        self,
        prompts: Sequence[tuple[Ids, float]],
        generator: torch.Generator,
        go_on: Callable[[int], bool] = lambda tokens: True,
    ) -> list[Sample]:
        """See Source."""
        waiting = deque(enumerate(prompts))
        free = list(range(self._slots - 1, -1, -1))
        running: list[_Answer] = []
        done: dict[int, Sample] = {}
        tokens = 0
        while waiting or running:
            while waiting and free:
                number, (prompt, temperature) = waiting.popleft()
                running.append(_Answer(number, prompt, temperature, free.pop()))
            tokens += self._pass(running, generator)
            over = not go_on(tokens) and tokens > 0
            for answer in running:
                if self._ended(answer) or (over and answer.tokens):
                    done[answer.number] = answer.sample()
                    free.append(answer.slot)
            if over:
                break
            running = [answer for answer in running if answer.number not in done]
        return [done[number] for number in sorted(done)]

    def _ended(self, answer: _Answer) -> bool:
        if not answer.tokens:
            return False
        full = len(answer.prompt) + len(answer.tokens) >= self._context
        return full or len(answer.tokens) >= self._longest or answer.tokens[-1] in self._model.eos

    def _pass(self, running: Sequence[_Answer], generator: torch.Generator) -> int:
        """Returns how many answers grew."""
        rows: list[SlotRow] = []
        deciding: list[_Answer] = []
        keep: list[int] = []
        length, budget = 0, self._prefill
        for answer in running:
            tokens = answer.next_tokens(budget)
            if not answer.tokens:
                budget -= len(tokens)
            if not tokens:
                continue
            rows.append(SlotRow(answer.slot, tokens, answer.cached))
            answer.cached += len(tokens)
            length += len(tokens)
            if answer.cached == len(answer.prompt) + len(answer.tokens):
                deciding.append(answer)
                keep.append(length - 1)
        logits = self._model.run(self._cache, rows, keep).float()  # [N, V]
        if deciding:
            self._decide(deciding, logits, generator)
        return len(deciding)

    def _decide(self, answers: Sequence[_Answer], logits: Tensor, generator: torch.Generator) -> None:
        best, ids = logits.topk(self._pool, -1)  # [N, pool]
        logp = best[:, : self._top] - logits.logsumexp(-1, keepdim=True)
        heat = torch.tensor([answer.temperature for answer in answers], device=best.device)[:, None]
        race = torch.empty(best.shape).exponential_(generator=generator).to(best.device)
        noisy = (best / heat.clamp_min(1e-6) - race.log()).argmax(-1)
        places = torch.where(heat[:, 0] > 0, noisy, 0)
        tokens = ids.gather(1, places[:, None])[:, 0].tolist()
        kept_ids, kept_logp = ids[:, : self._top].to("cpu", torch.int32), logp.to("cpu", torch.float16)
        for n, answer in enumerate(answers):
            answer.tokens.append(tokens[n])
            answer.top_ids.append(kept_ids[n])
            answer.top_logp.append(kept_logp[n])
