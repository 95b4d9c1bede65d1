"""What a draft is worth to a target: speculation by the real engines, in turns, without actors.

Draft and target alternate (a chain of k draft tokens, then a pass), so the figures are those of the pair and of the
acceptance rule, whatever the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from actors.engines.protocol import DraftModel, Expand, FeatureReader, Proposal, Ranked, Row, TargetModel
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.transformers.slots import SlotRow
from actors.engines.transformers.target import TransformersTarget
from actors.messages import OpenSequence, Support, VerificationResult
from actors.settings import DraftSettings, Rule, SamplingSettings, TargetSettings, TreeSettings
from cluster.distillation.prompts import Ids


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One rule at one temperature.

    tested: draft tokens that a pass decided on: those accepted, and the first rejected of each block. rate is
    accepted / tested; length is tokens committed per pass and sequence, of which at most lookahead + 1.
    length_error: standard error of length, taking blocks as independent.
    """

    rule: Rule
    temperature: float
    lookahead: int
    rate: float
    rate_error: float
    length: float
    length_error: float
    tested: int
    blocks: int
    places: tuple[tuple[int, int], ...] = ()
    """By place in the block: (accepted, tested), where all before it were accepted."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the draft's likeliest token is the target's own, along the target's greedy answers."""

    agreed: int
    tokens: int

    @property
    def share(self) -> float:
        return self.agreed / max(self.tokens, 1)

    @property
    def error(self) -> float:
        """Standard error, taking tokens as independent."""
        return math.sqrt(self.share * (1 - self.share) / max(self.tokens, 1))


def acceptance(
    target: CausalLM,
    draft: CausalLM,
    prompts: Sequence[Ids],
    *,
    rule: Rule,
    temperature: float,
    tokens: int,
    lookahead: int = 4,
    seed: int = 0,
) -> Acceptance:
    """Generate `tokens` tokens for every prompt, side by side, and count. Ends of text do not end an answer."""
    context = max(map(len, prompts)) + tokens + lookahead + 1
    slots = len(prompts)
    tree = TreeSettings(width=1, branching=1, depth=lookahead, nodes=lookahead + 1)
    return measure(
        TransformersTarget(target, TargetSettings(slots=slots, context=context, rule=rule)),
        TransformersDraft(
            draft, DraftSettings(slots=slots, context=context, prefill_chunk=slots * context, tree=tree, rule=rule)
        ),
        prompts,
        rule=rule,
        temperature=temperature,
        tokens=tokens,
        lookahead=lookahead,
        seed=seed,
    )


def measure(
    target: TargetModel,
    draft: DraftModel,
    prompts: Sequence[Ids],
    *,
    rule: Rule,
    temperature: float,
    tokens: int,
    lookahead: int,
    seed: int = 0,
) -> Acceptance:
    """As `acceptance`, with engines of any kind; the draft may propose less than it is asked for, or nothing."""
    sampling = SamplingSettings(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    requests = [OpenSequence(str(n), prompt, sampling, seed + n) for n, prompt in enumerate(prompts)]
    outputs: list[list[int]] = [[] for _ in requests]
    cached = [0] * len(requests)
    for slot, request in enumerate(requests):
        target.attach(slot, request)
        draft.open(request)
    lengths: list[int] = []
    accepted = [0] * lookahead
    tested = [0] * lookahead
    while running := [n for n, output in enumerate(outputs) if len(output) < tokens]:
        proposals = _draft_chains(draft, running, lookahead)
        rows = []
        for n in running:
            text = (*requests[n].prompt, *outputs[n])
            rows.append(Row(n, (*text[cached[n] :], *proposals[n].tokens), cached[n], proposals[n]))
        for n, row, outcome in zip(running, rows, target.forward(rows), strict=True):
            found = _checked(outcome)
            cached[n] = len(requests[n].prompt) + len(outputs[n]) + len(found.tokens) - 1
            outputs[n].extend(found.tokens)
            target.record(n, found.tokens)
            draft.advance(requests[n].sequence, found.tokens)
            if found.features is not None and isinstance(draft, FeatureReader):
                draft.read_features(requests[n].sequence, found.features)
            lengths.append(len(found.tokens))
            for place in range(min(found.accepted + 1, len(row.proposal.tokens))):
                tested[place] += 1
                accepted[place] += place < found.accepted
    for slot, request in enumerate(requests):
        target.detach(slot)
        draft.close(request.sequence)
    decided = sum(tested)
    rate, length = sum(accepted) / max(decided, 1), sum(lengths) / len(lengths)
    spread = sum((x - length) ** 2 for x in lengths) / max(len(lengths) - 1, 1)
    return Acceptance(
        rule=rule,
        temperature=temperature,
        lookahead=lookahead,
        rate=rate,
        rate_error=math.sqrt(rate * (1 - rate) / max(decided, 1)),
        length=length,
        length_error=math.sqrt(spread / len(lengths)),
        tested=decided,
        blocks=len(lengths),
        places=tuple(zip(accepted, tested, strict=True)),
    )


def agreement(target: CausalLM, draft: CausalLM, prompts: Sequence[Ids], tokens: int, slots: int = 16) -> Agreement:
    """Along greedy answers of at most `tokens` tokens; the end of text counts, and ends an answer."""
    agreed = count = 0
    for start in range(0, len(prompts), slots):
        batch = prompts[start : start + slots]
        for prompt, answer in zip(batch, greedy_answers(target, batch, tokens), strict=True):
            guesses = greedy_guesses(draft, prompt, answer)
            agreed += sum(guess == token for guess, token in zip(guesses, answer, strict=True))
            count += len(answer)
    return Agreement(agreed, count)


def greedy_answers(model: CausalLM, prompts: Sequence[Ids], tokens: int) -> list[list[int]]:
    """Plain greedy decoding, side by side."""
    cache = model.cache(slots=len(prompts), context=max(map(len, prompts)) + tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    for _ in range(tokens):
        rows = []
        for n in running:
            new = answers[n][-1:] or prompts[n]
            rows.append(SlotRow(n, new, len(prompts[n]) + len(answers[n]) - len(new) if answers[n] else 0))
        ends = [sum(len(r.tokens) for r in rows[: i + 1]) - 1 for i in range(len(rows))]
        best = model.run(cache, rows, ends).argmax(-1).tolist()
        for n, token in zip(running, best, strict=True):
            answers[n].append(token)
        running = [n for n in running if answers[n][-1] not in model.eos]
        if not running:
            break
    return answers


def greedy_guesses(draft: CausalLM, prompt: Ids, answer: Sequence[int]) -> list[int]:
    """The draft's likeliest token (a target's id) at each position of `answer`."""
    text = [*prompt, *answer]
    cache = draft.cache(slots=1, context=len(text))
    best = draft.run(cache, [SlotRow(0, text, 0)], range(len(prompt) - 1, len(text) - 1)).argmax(-1)
    ids = best if draft.vocabulary is None else draft.vocabulary[best]
    guesses: list[int] = ids.tolist()
    return guesses


class Length(Protocol):
    """A measured acceptance length: tokens committed per pass and sequence, and its standard error."""

    @property
    def length(self) -> float: ...

    @property
    def length_error(self) -> float: ...


def is_better(new: Length, old: Length, z: float = 1.64) -> bool:
    """Whether `new` commits more tokens per pass than `old` by more than chance (one-sided 5 % at z = 1.64)."""
    return new.length - old.length > z * math.hypot(new.length_error, old.length_error)


def _draft_chains(draft: DraftModel, running: Sequence[int], lookahead: int) -> dict[int, Proposal]:
    paths: dict[int, list[int]] = {n: [] for n in running}
    confidences: dict[int, list[float]] = {n: [] for n in running}
    supports: dict[int, list[Support]] = {n: [] for n in running}
    growing = set(running)
    for _ in range(lookahead):
        asked = [Expand(str(n), tuple(paths[n])) for n in running if n in growing]
        growing = set()
        for answer in draft.expand(asked) if asked else ():
            n = int(answer.sequence)
            step = _new_tokens(answer, len(paths[n]), lookahead)
            if not step:
                continue
            paths[n].extend(step)
            confidences[n].extend(answer.confidences[: len(step)])
            if answer.support is not None:
                supports[n].append(answer.support)
            growing.add(n)
    return {n: Proposal(tuple(paths[n]), tuple(confidences[n]), tuple(supports[n])) for n in running}


def _new_tokens(answer: Ranked, done: int, lookahead: int) -> tuple[int, ...]:
    """The sampled child, unless the chain is long enough or the answer is about another node."""
    return answer.tokens[:1] if len(answer.path) == done < lookahead else ()


def _checked(outcome: VerificationResult | None) -> VerificationResult:
    assert outcome is not None  # every row asked for a decision
    if outcome.error is not None:
        raise outcome.error
    return outcome
