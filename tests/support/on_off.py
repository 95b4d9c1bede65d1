"""Speculation on against off, for every sampling setting alone and in random combination.

The drafts are scripted from the answers without speculation: a Twin proposes them, a Foe never does, and a Rigged
draft does most of the time and anything else otherwise, ids that do not exist among it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lossy_path import Answer, LossyPath, RandomLookahead

from actors.engines.protocol import DraftModel, Expand, ModelCard, Ranked, TargetModel
from actors.messages import OpenSequence
from actors.settings import LookaheadSettings, SamplingSettings, TargetSettings
from actors.text.answer_comparison import Comparison, Reference

CHARACTERS = ("twin", "foe", "rigged")
Fields = dict[str, object]


class ScriptedDrafts:
    """Implements protocol.DraftModel. Each sequence's draft has one character; `answers` is what the target says."""

    def __init__(self, answers: dict[str, Sequence[int]], vocabulary: int, rng: random.Random) -> None:
        self._answers, self._vocabulary, self._rng = answers, vocabulary, rng
        self._characters = {name: CHARACTERS[i % 3] for i, name in enumerate(answers)}
        self._committed: dict[str, list[int]] = {}

    def card(self) -> ModelCard:
        return ModelCard("scripted", 0, 4096, 64)

    def open(self, opening: OpenSequence) -> None:
        self._committed[opening.sequence] = list(opening.committed)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self._committed[sequence].extend(tokens)

    def close(self, sequence: str) -> None:
        del self._committed[sequence]

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        return [self._rank(request) for request in requests]

    def _rank(self, request: Expand) -> Ranked:
        said, rng = [*self._committed[request.sequence], *request.path], self._rng
        answer = self._answers[request.sequence]
        follows = len(said) < len(answer) and list(answer[: len(said)]) == said
        right = answer[len(said)] if follows else rng.randrange(self._vocabulary)
        wrong = (right + rng.randrange(1, self._vocabulary)) % self._vocabulary
        character = self._characters[request.sequence]
        token = right if character == "twin" or (character == "rigged" and rng.random() < 0.8) else wrong
        if character == "rigged" and rng.random() < 0.05:
            token = rng.choice((self._vocabulary, 10**9))
        other = right if token == wrong else wrong
        return Ranked(request.sequence, request.path, (token, other), (rng.random(), 0.3))


def settings_alone(common: Sequence[int], vocabulary: int, rng: random.Random, grammars: Sequence[str]) -> list[Fields]:
    """Every setting by itself. common: ids that answers often hold, so that the settings have something to do."""
    a, b, c, d, e = common[:5]
    allowed = tuple({*common, *(rng.randrange(vocabulary) for _ in range(vocabulary // 8))})
    return [
        {"temperature": 0},
        {"temperature": 1e-30},
        {"temperature": 0.3},
        {"temperature": 10},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.7},
        {"logit_bias": {a: -100.0, b: 4.0}},
        {"min_tokens": 6, "stop_token_ids": (c, d)},
        {"stop_token_ids": (a, e)},
        {"allowed_token_ids": allowed},
        {"bad_words": ((b,), (a, c), (d, a), (e, e))},
        {"ignore_eos": True},
        {"logprobs": 3},
        *({"grammar": grammar} for grammar in grammars),
    ]


@dataclass
class Sweep:
    """What a comparison found."""

    tolerance: float
    tally: Comparison = field(init=False)
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    branches: int = 0
    """Accepted tokens that were alternatives to a more likely one in the same pass."""
    lookaheads: set[int] = field(default_factory=set)
    settings: int = 0
    errors: int = 0
    """Requests that end because no token is left to choose: the same way with speculation as without."""

    def __post_init__(self) -> None:
        self.tally = Comparison(self.tolerance)


def sweep(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    rng: random.Random,
    *,
    tokens: int,
    grammars: Sequence[str] = (),
    draft: Callable[[dict[str, Sequence[int]]], DraftModel] | None = None,
    tolerance: float = 0.0,
) -> Sweep:
    """Answer each prompt without and with speculation; half of them under one setting, half under two to five.

    Some are then resumed from inside their answers, as a replica does that takes over: the rest must be the same too.
    draft: made from the answers without speculation; scripted ones by default.
    """
    card = target.card()
    settings = TargetSettings(
        slots=card.slots, context=card.context, queue=len(prompts), lookahead=LookaheadSettings(maximum=6)
    )
    first = plain(
        target, settings, [opening(n, p, {"temperature": 0.8}, tokens, rng) for n, p in enumerate(prompts[:32])]
    )
    counted = Counter(token for answer in first.values() for token in answer.tokens)
    common = [token for token, _ in counted.most_common(16) if token not in card.eos]
    alone = settings_alone(common, card.vocabulary, rng, grammars)
    openings = [opening(n, prompt, chosen(alone, n, rng), tokens, rng) for n, prompt in enumerate(prompts)]
    references = plain(target, settings, openings)
    again = rng.sample(openings, len(openings) // 5)
    resumed = [half_answered(o, references[o.sequence], rng) for o in again]
    openings += [opening for opening, _ in resumed]
    references |= {opening.sequence: rest for opening, rest in resumed}
    scripts: dict[str, Sequence[int]] = {o.sequence: [*o.committed, *references[o.sequence].tokens] for o in openings}
    drafts = draft(scripts) if draft is not None else ScriptedDrafts(scripts, card.vocabulary, rng)
    path = LossyPath(target, drafts, settings, rng, controller=lambda it, _: RandomLookahead(it, rng))
    found = Sweep(tolerance, settings=len(alone))
    for name, answer in path.run(openings).items():
        compare(found, name, references[name], answer)
    found.proposed, found.accepted, found.passes = path.proposed, path.accepted, path.passes
    found.lookaheads, found.branches = path.lengths, path.branches
    return found


def half_answered(opening: OpenSequence, answer: Answer, rng: random.Random) -> tuple[OpenSequence, Answer]:
    """The same request with a part of its answer committed, and what is left of the answer."""
    done = rng.randrange(max(1, len(answer.tokens)))
    again = replace(opening, sequence=f"{opening.sequence}-resumed", committed=tuple(answer.tokens[:done]))
    left = Answer(answer.tokens[done:], answer.margins[done:], answer.alternatives[done:], answer.finish, answer.error)
    return again, left


def plain(target: TargetModel, settings: TargetSettings, openings: Sequence[OpenSequence]) -> dict[str, Answer]:
    """One token to a pass and sequence."""
    return LossyPath(target, None, settings, random.Random(0)).run(openings)


def opening(number: int, prompt: Sequence[int], fields: Fields, tokens: int, rng: random.Random) -> OpenSequence:
    values = {"max_tokens": tokens, "margins": True, **fields}
    return OpenSequence(f"s{number}", tuple(prompt), SamplingSettings.model_validate(values), rng.randrange(2**63))


def chosen(alone: Sequence[Fields], number: int, rng: random.Random) -> Fields:
    """One after another for the even ones, a random combination for the odd ones."""
    if number % 2 == 0:
        return alone[number // 2 % len(alone)]
    return {name: value for fields in rng.sample(alone, rng.randrange(2, 6)) for name, value in fields.items()}


def compare(found: Sweep, name: str, reference: Answer, answer: Answer) -> None:
    """Tokens, log-probabilities, and how and why the answer ends."""
    before = found.tally.ties
    found.tally.add(name, Reference(reference.tokens, reference.margins), answer.tokens)
    if found.tally.ties > before or (found.tally.different and found.tally.different[-1].startswith(f"{name}:")):
        return
    if (reference.finish, str(reference.error)) != (answer.finish, str(answer.error)):
        found.tally.different.append(f"{name}: it ends with {answer.finish}, {answer.error}")
    for one, other in zip(reference.alternatives, answer.alternatives, strict=True):
        if abs(one.logprob - other.logprob) > 1e-3 or len(one.top) != len(other.top):
            found.tally.different.append(f"{name}: a log-probability is {other.logprob}, not {one.logprob}")
    found.errors += reference.error is not None
