"""What two models have in common: how far q is from p, and how well the draft guesses what it got wrong.

Along the target's own answers, both models are asked for their distribution at every position. No rule and no
lookahead comes into it; what the rules make of a pair is evaluation.py's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from actors.algorithms.noise import gumbel
from actors.engines.protocol import Row
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import SlotRow
from actors.engines.transformers.target import TransformersTarget
from actors.messages import OpenSequence
from actors.settings import SamplingSettings, TargetSettings
from cluster.distillation.prompts import Ids

GUESSES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Overlap:
    """overlap: mean of 1 - TV(p, q), the sum of min(p, q); its error is the standard error, positions independent.

    first: share of positions where the draft's best guess is the target's token, noise shared.
    corrections: of the other positions, the share where the target's token is among the next 1, 2, 4, 8 guesses.
    """

    temperature: float
    positions: int
    overlap: float
    overlap_error: float
    first: float
    corrections: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def expected_length(acceptance: float, lookahead: int) -> float:
    """Tokens a pass commits if every draft token is accepted with the same odds, whatever came before.

    (1 - a^(k+1)) / (1 - a): Leviathan, Kalman, Matias (ICML 2023), equation 1.
    """
    return math.fsum(acceptance**i for i in range(lookahead + 1))


def overlap(
    target: CausalLM, draft: CausalLM, prompts: Sequence[Ids], *, temperature: float, tokens: int, seed: int = 0
) -> Overlap:
    """Compare p and q along answers of at most `tokens` tokens; the end of a text counts, and ends an answer."""
    masses: list[float] = []
    ranks: list[int] = []
    settled = plain_answers(target, prompts, temperature=temperature, tokens=tokens, seed=seed)
    for n, (prompt, answer) in enumerate(zip(prompts, settled, strict=True)):
        p = _scores(target, prompt, answer, target.vocabulary_size)  # [len(answer), V]
        q = _scores(draft, prompt, answer, target.vocabulary_size)
        if temperature > 0:
            p, q = p / temperature, q / temperature
            masses += torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).tolist()
            where = torch.arange(len(prompt), len(prompt) + len(answer))
            ids = torch.arange(target.vocabulary_size)
            noise = gumbel(torch.full_like(where, seed + n), where, ids, dtype=torch.float64)
            q = q.double() + noise.to(q.device)
        chosen = torch.tensor(answer, device=q.device)[:, None]
        scores = q.gather(1, chosen)
        better = (q > scores).sum(-1)
        ranks += torch.where(scores[:, 0].isfinite(), better, target.vocabulary_size).tolist()  # what it lacks: last
        if temperature == 0:
            masses += (p.argmax(-1) == q.argmax(-1)).double().tolist()
    count = len(ranks)
    mean = sum(masses) / count
    wrong = [rank for rank in ranks if rank > 0]
    return Overlap(
        temperature=temperature,
        positions=count,
        overlap=mean,
        overlap_error=math.sqrt(sum((mass - mean) ** 2 for mass in masses)) / count,
        first=1 - len(wrong) / count,
        corrections={n: sum(rank <= n for rank in wrong) / max(len(wrong), 1) for n in GUESSES},
    )


def plain_answers(
    target: CausalLM, prompts: Sequence[Ids], *, temperature: float, tokens: int, seed: int, slots: int = 16
) -> list[list[int]]:
    """The target's own answers, side by side; prompt n is answered with the noise of seed + n."""
    sampling = SamplingSettings(temperature=temperature, max_tokens=tokens)
    answers: list[list[int]] = []
    for start in range(0, len(prompts), slots):
        batch = prompts[start : start + slots]
        context = max(map(len, batch)) + tokens
        engine = TransformersTarget(target, TargetSettings(slots=len(batch), context=max(context, 8)))
        for slot, prompt in enumerate(batch):
            engine.attach(slot, OpenSequence(str(slot), prompt, sampling, seed + start + slot))
        mine: list[list[int]] = [[] for _ in batch]
        running = list(range(len(batch)))
        for _ in range(tokens):
            rows = [
                Row(n, tuple(mine[n][-1:]) or batch[n], len(batch[n]) + len(mine[n]) - 1 if mine[n] else 0)
                for n in running
            ]
            for n, outcome in zip(running, engine.forward(rows), strict=True):
                assert outcome is not None  # every row asks for a decision
                engine.record(n, outcome.tokens)
                mine[n].extend(outcome.tokens)
            running = [n for n in running if mine[n][-1] not in target.eos]
            if not running:
                break
        answers += mine
    return answers


def _scores(model: CausalLM, prompt: Ids, answer: Sequence[int], vocabulary: int) -> Tensor:
    """Logits [len(answer), V] at each position of the answer, by the target's ids; -inf for what the model lacks."""
    text = [*prompt, *answer]
    cache = model.cache(slots=1, context=len(text))
    logits = model.run(cache, [SlotRow(0, text, 0)], range(len(prompt) - 1, len(text) - 1))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if model.vocabulary is None:
        return logits
    full = logits.new_full((len(answer), vocabulary), -torch.inf)
    full[:, model.vocabulary] = logits
    return full
