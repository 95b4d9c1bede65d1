"""Prompts from the target itself: it is left to write what a user might say, and what makes no sense is dropped.

A chat model that is shown its own template up to where the user speaks goes on as users do (Xu et al., "Magpie:
Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", 2024, section 2.1). A base model, which
has no template, goes on from where documents start. Knows nothing of files and command lines.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from actors.errors import ConfigError, PromptError
from cluster.distillation.prompts import Codec, Ids
from cluster.distillation.sampler import Source
from cluster.distillation.store import Sample

Fault = Literal["unfinished", "empty", "repetitive", "garbled", "duplicate", "too long"]
TEMPERATURES = (0.7, 0.9, 1.0, 1.0, 1.1)
SYSTEMS = (
    None,
    "You are a helpful assistant.",
    "You are a programming assistant. Users ask you about code, errors and tools.",
    "You are a tutor. Users bring exercises in mathematics and science.",
    "You are an editor. Users bring texts to translate, shorten, correct or rewrite.",
    "You answer questions about everyday life: cooking, health, travel, money, work.",
)
"""What the assistant is told before the user speaks; None leaves what the template says by itself."""
LONGEST = 96
"""Tokens of a turn; longer ones are unfinished."""
LEAST_KEPT = 0.2
"""With fewer of its turns kept, the target is taken for one that cannot write prompts."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MARK = "\N{WHITE CIRCLE}user turn\N{WHITE CIRCLE}"
"""Stands for the user's words while a template is taken apart; no template has it."""


class ChatCodec(Codec, Protocol):
    """The part of text.TextCodec that is needed here."""

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Opening:
    """Where the target is left to write. prefix: ids up to the user's first word. system: what the assistant was told.

    plain: no chat; what is written is the beginning of a document.
    """

    prefix: Ids
    system: str | None = None
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """Prompts that the target wrote. turns: how many it wrote in all; faults: why the others were dropped."""

    prompts: list[Ids]
    turns: int
    faults: Mapping[Fault, int]

    @property
    def kept(self) -> float:
        """Share of the turns that are prompts now."""
        return len(self.prompts) / self.turns if self.turns else 0.0

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {fault}" for fault, count in sorted(self.faults.items()))
        kept = f"kept {len(self.prompts)} of {self.turns} turns ({self.kept:.0%})"
        return f"{kept}; dropped: {dropped}" if dropped else kept


def chat_openings(codec: ChatCodec, systems: Sequence[str | None] = SYSTEMS) -> tuple[list[Opening], int]:
    """The template up to the user's words, for each system prompt that it takes, and the id that ends the user's turn.

    Raises ConfigError if the template does not show the user's words as they are.
    """
    openings, ends = [], set[int]()
    for system in systems:
        told = [] if system is None else [{"role": "system", "content": system}]
        try:
            text = codec.render_chat([*told, {"role": "user", "content": MARK}])
        except PromptError:
            if system is None:
                raise
            continue  # a template without a place for it
        before, mark, after = text.partition(MARK)
        if not mark or not after:
            raise ConfigError(
                "the target's chat template does not show where a user's words begin and end: give prompts"
            )
        openings.append(Opening(codec.encode(before, special=False), system))
        ends.add(codec.encode(after, special=False)[0])
    if len(ends) != 1:
        raise ConfigError("the target's chat template ends a user's turn in more than one way: give prompts")
    return openings, ends.pop()


def document_openings(bos: int | None, eos: Sequence[int]) -> list[Opening]:
    """Where documents of a base model start. Raises ConfigError if the tokenizer marks neither start nor end."""
    start = bos if bos is not None else (eos[0] if eos else None)
    if start is None:
        raise ConfigError("the target has no chat template and no token that starts a document: give prompts")
    return [Opening((start,), plain=True)]


def write_prompts(
    source: Source,
    codec: ChatCodec,
    openings: Sequence[Opening],
    end: int | None,
    *,
    count: int,
    limit: int,
    seed: int,
    shard: int = 192,
    go_on: Callable[[int, int], bool] = lambda kept, turns: True,
) -> Written:
    """Have the target write until `count` prompts were kept, or `go_on` (told how many are kept, of how many) says no.

    source: samples answers of at most LONGEST tokens. end: the id that ends a turn, None for documents, which end
    anywhere. limit: most tokens of a prompt.

    Raises PromptError if hardly anything that the target wrote can be kept.
    """
    prompts: dict[Ids, None] = {}
    seen: set[str] = set()
    faults: Counter[Fault] = Counter()
    turns = 0
    while len(prompts) < count and go_on(len(prompts), turns):
        draw = random.Random(f"{seed}/own prompts/{turns}")
        chosen = [draw.choice(openings) for _ in range(shard)]
        generator = torch.Generator().manual_seed(seed * 1_000_003 + turns)
        samples = source.sample([(one.prefix, draw.choice(TEMPERATURES)) for one in chosen], generator)
        for opening, sample in zip(chosen, samples, strict=False):
            turns += 1
            ids, fault = _prompt(opening, sample, codec, end, limit, seen, draw)
            if fault is not None:
                faults[fault] += 1
            elif len(prompts) < count:
                prompts[ids] = None
            else:
                turns -= 1  # enough
        written = Written(list(prompts), turns, faults)
        if turns >= shard and written.kept < LEAST_KEPT:
            raise PromptError(f"the target writes hardly any prompts ({written}): give prompts")
    return Written(list(prompts), turns, faults)


def _prompt(
    opening: Opening, sample: Sample, codec: ChatCodec, end: int | None, limit: int, seen: set[str], draw: random.Random
) -> tuple[Ids, Fault | None]:
    tokens: list[int] = sample.answer.tolist()
    if opening.plain:
        tokens = tokens[: draw.randint(8, 64)]
    elif tokens[-1] != end:
        return (), "unfinished"
    else:
        tokens = tokens[:-1]
    text = codec.decode(tokens).strip()
    fault = fault_of(text, likelihood(sample, len(tokens)))
    key = " ".join(text.casefold().split())
    if fault is None and key in seen:
        fault = "duplicate"
    if fault is not None:
        return (), fault
    seen.add(key)
    if opening.plain:
        ids = (*opening.prefix, *tokens)
    else:
        told = [] if opening.system is None else [{"role": "system", "content": opening.system}]
        ids = codec.encode_chat([*told, {"role": "user", "content": text}])
    return (ids, None) if len(ids) <= limit else ((), "too long")


def likelihood(sample: Sample, tokens: int) -> float:
    """Mean log-probability of the first `tokens` tokens of an answer; one that is not stored counts as the least."""
    if not tokens:
        return 0.0
    ids, logp = sample.top_ids[:tokens], sample.top_logp[:tokens].float()  # [N, top]
    chosen = ids == sample.answer[:tokens, None]
    own = torch.where(chosen, logp, -torch.inf).amax(-1)
    return float(torch.where(chosen.any(-1), own, logp.amin(-1) - 1.0).mean())


UNLIKELY = -3.2
"""Mean log-probability below which a text is taken for noise. Of 384 turns of the demo target, those that read well lay
above it but for a few, and a third of those below it made no sense."""


def fault_of(text: str, mean_logp: float) -> Fault | None:
    """Why a text is no prompt, None if it is one."""
    words = text.split()
    if len(words) < 3:
        return "empty"
    if _repeats(words):
        return "repetitive"
    letters = sum(character.isalpha() or character.isspace() for character in text) / len(text)
    odd = any(not (character.isprintable() or character in "\n\t") or character == REPLACEMENT for character in text)
    longest = max(map(len, words))
    if odd or letters < 0.6 or longest > 60 or mean_logp < UNLIKELY:
        return "garbled"
    return None


def _repeats(words: Sequence[str]) -> bool:
    """A loop: of the runs of three words, fewer than two thirds are different ones."""
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(runs) >= 6 and len(set(runs)) < len(runs) * 2 / 3
