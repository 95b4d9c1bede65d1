"""What emulated models say: tokens by hash of the prefix, and a draft that agrees with stated probabilities.

Nothing here knows of time, passes or actors. Every quantity is a function of the prefix (and of the seed when
sampling), on and off the true path, so an output can be checked exactly by whoever knows the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Self

from pydantic import Field, model_validator

from actors.messages import EMPTY_PREFIX, OpenSequence, extend_key, prefix_key
from actors.settings import SamplingSettings, Settings

Probability = Annotated[float, Field(ge=0, le=1)]

# Streams of independent draws at one prefix.
_TOKEN = 0x1F83D9ABFB41BD6B
_END = 0x5BE0CD19137E2179
_SEED = 0x3C6EF372FE94F82B
_CONFIDENCE = 0x2545F4914F6CDD1D
_RANK = 0x452821E638D01377
_JUNK = 0x13198A2E03707344


class Language(Settings):
    """What a target says; its draft must be given the same."""

    vocabulary: Annotated[int, Field(ge=128)] = 32000
    """The last id is end-of-sequence and appears only with `eos_probability`."""
    eos_probability: Probability = 0.0
    """Per token, so that answers vary in length."""
    salt: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Another salt is another model: its tokens have nothing to do with this one's."""

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end an answer; none when they never appear."""
        return (self.vocabulary - 1,) if self.eos_probability else ()

    @property
    def fingerprint(self) -> str:
        """Digest by which a draft of another language is found out."""
        return blake2b(self.model_dump_json().encode(), digest_size=8).hexdigest()


class Agreement(Settings):
    """How a draft relates to its target.

    Each prefix has a confidence c, drawn uniformly from acceptance ± spread; the first guess is right with
    probability c. If it is wrong, the right token is within the next 1/2/4/8 guesses with `corrections`.
    """

    acceptance: Probability = 0.8
    spread: Annotated[float, Field(ge=0, le=0.5)] = 0.15
    corrections: tuple[Probability, Probability, Probability, Probability] = (0.40, 0.55, 0.72, 0.85)
    overconfidence: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Reports c ** (1 / overconfidence) instead of c: above 1 the draft claims more than it keeps."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.spread <= min(self.acceptance, 1 - self.acceptance) + 1e-12:
            raise ValueError(f"acceptance {self.acceptance} ± spread {self.spread} leaves the range 0 to 1")
        if list(self.corrections) != sorted(self.corrections):
            raise ValueError("corrections are cumulative (within 1, 2, 4, 8 guesses) and cannot fall")
        return self

    @property
    def ranks(self) -> tuple[float, ...]:
        """Probability of each of the eight guesses after a wrong first one."""
        one, two, four, eight = self.corrections
        return (one, two - one, *[(four - two) / 2] * 2, *[(eight - four) / 4] * 4)


def draw_key(key: int, seed: int | None, language: Language) -> int:
    """Key of the draws at the prefix `key`: noise enters only when sampling (`seed` given)."""
    key = extend_key(key, _SEED ^ language.salt) if language.salt else key
    return key if seed is None else extend_key(key ^ _SEED, seed)


def uniform(key: int, stream: int) -> float:
    """A number in [0, 1) that depends on the prefix and the stream alone."""
    return (extend_key(key, stream) >> 11) * 2.0**-53


def next_token(
    key: int, seed: int | None, language: Language, banned: Sequence[int] = (), *, may_end: bool = True
) -> int:
    """The target's token after the prefix named `key`; `seed` is None when greedy.

    banned: stop tokens that may not appear yet (min_tokens); the next id that is allowed takes their place.
    """
    draws = draw_key(key, seed, language)
    if may_end and language.eos_probability and uniform(draws, _END) < language.eos_probability:
        return language.vocabulary - 1
    ordinary = language.vocabulary - 1
    token = extend_key(draws, _TOKEN) % ordinary
    for _ in range(len(banned)):
        if token not in banned:
            break
        token = (token + 1) % ordinary
    return token


def token_at(key: int, position: int, opening: OpenSequence, language: Language) -> int:
    """`next_token` under a request's settings, at absolute `position`."""
    sampling = opening.sampling
    early = position - len(opening.prompt) < sampling.min_tokens
    seed = None if sampling.greedy else opening.seed
    return next_token(key, seed, language, sampling.stop_token_ids if early else (), may_end=not early)


def ranked_tokens(
    draws: int, truth: int, language: Language, agreement: Agreement, count: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The draft's `count` best guesses at one prefix, best first, and the confidence of each.

    draws: `draw_key` of the prefix. truth: the target's token there (`next_token`, or `token_at`).
    """
    confidence = agreement.acceptance + agreement.spread * (2 * uniform(draws, _CONFIDENCE) - 1)
    ranks = agreement.ranks
    chances = [confidence, *[(1 - confidence) * share for share in ranks]]
    left = uniform(draws, _RANK)
    rank = None
    for candidate, chance in enumerate(chances):
        if left < chance:
            rank = candidate
            break
        left -= chance
    ordinary = language.vocabulary - 1
    offset = 1 + extend_key(draws, _JUNK) % (ordinary - 64)
    tokens = [(truth + offset + i) % ordinary for i in range(count)]  # distinct, and never the truth
    if rank is not None and rank < count:
        tokens[rank] = truth
    claimed = confidence ** (1 / agreement.overconfidence)
    scale = (1 - claimed) / (1 - confidence) if confidence < 1 else 0.0
    claims = [claimed, *[chance * scale for chance in chances[1:]]]
    claims += [0.0] * (count - len(claims))
    return tuple(tokens), tuple(claims[:count])


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    seed: int | None,
    language: Language,
    sampling: SamplingSettings | None = None,
) -> tuple[int, ...]:
    """What any deployment with an emulated target of this language must answer: at most `count` tokens.

    seed: None when greedy. An end-of-sequence token ends the answer and is included. `sampling` matters for
    min_tokens, stop_token_ids and ignore_eos only.
    """
    sampling = sampling or SamplingSettings(max_tokens=max(count, 1))
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(language.eos))
    key = prefix_key(prompt, EMPTY_PREFIX)
    tokens: list[int] = []
    while len(tokens) < count:
        early = len(tokens) < sampling.min_tokens
        token = next_token(key, seed, language, sampling.stop_token_ids if early else (), may_end=not early)
        tokens.append(token)
        key = extend_key(key, token)
        if token in ends:
            break
    return tuple(tokens)
