"""Suffix trees of what was said before: one per running request, and one per tenant over the tenant's past answers.

The trees are those of the library `arctic-inference` (Oliaro et al., "SuffixDecoding", arXiv 2411.04975), an optional
extra that is imported when a memory is made. Here is what the library does not know: whose text it is, and how much of
it may be held. One tenant's text is never looked up for another one, and where room is short the tenant who holds most
gives up its own oldest answer, so that nobody can push out what others said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actors.errors import ConfigError
from actors.settings import MemorySettings

DEPTH = 64
"""Longest run of tokens that the trees tell apart: a context is matched, and continued, within it."""
PROMPT_TAIL = 16
"""Tokens at the end of the prompt that are remembered before the answer, so that its first tokens can be found."""
_LEAST_PROBABILITY = 0.1
"""Continuations that were seen in less than this share of the matches are left out, as the library does by default."""


class SuffixTreeDraft(Protocol):
    """What the library answers: a tree of tokens. Nothing in it is trusted (see suffix_draft.ranked)."""

    token_ids: list[int]
    parents: list[int]
    """Index of the token before it; -1 where there is none."""
    probs: list[float]
    """Share of the matches that went on to here, counted from the match: a child's is at most its parent's."""
    match_len: int
    """Tokens at the end of the context that occurred before."""


class SuffixCache(Protocol):
    """What is used of arctic_inference.suffix_decoding.SuffixDecodingCache."""

    def start_request(self, req_id: str, prompt_token_ids: Sequence[int]) -> None: ...

    def add_active_response(self, req_id: str, token_ids: Sequence[int]) -> None: ...

    def stop_request(self, req_id: str) -> None: ...

    def evict_cached_response(self, req_id: str) -> None: ...

    def speculate(
        self, req_id: str, context: Sequence[int], max_spec_tokens: int, *, min_token_prob: float, use_tree_spec: bool
    ) -> SuffixTreeDraft: ...


def suffix_caches() -> Callable[[], SuffixCache]:
    """What makes one tenant's trees. Raises ConfigError where the library is missing."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as error:
        raise ConfigError(
            "draft.kind 'suffix' needs the extra: pip install 'outrider[suffix]'", "draft.kind"
        ) from error

    def make() -> SuffixCache:
        cache: SuffixCache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=-1)  # bounded here
        return cache

    return make


@dataclass(slots=True)
class _Tenant:
    """One tenant's trees, and the tokens of each answer that they hold, oldest first."""

    cache: SuffixCache
    answers: dict[str, int] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    tokens: int = 0

    def add(self, sequence: str, tokens: Sequence[int]) -> int:
        """Append to an answer. Returns how many tokens the memory holds more."""
        self.cache.add_active_response(sequence, tokens)
        if sequence not in self.answers:
            return 0  # evicted while it runs: its own request goes on to be searched, and no other
        self.answers[sequence] += len(tokens)
        self.tokens += len(tokens)
        return len(tokens)

    def evict(self, sequence: str) -> int:
        """Forget an answer. Returns how many tokens that frees."""
        self.cache.evict_cached_response(sequence)
        freed = self.answers.pop(sequence)
        self.tokens -= freed
        return freed


class SuffixMemory:
    """Past and running answers of all tenants. Its size is bounded by `settings`, over all tenants together.

    Not part of that bound are the trees of running requests, one per slot, over prompt and answer.
    """

    def __init__(self, settings: MemorySettings, make_cache: Callable[[], SuffixCache]) -> None:
        self._settings, self._make_cache = settings, make_cache
        self._tenants: dict[str, _Tenant] = {}
        self._owners: dict[str, str] = {}
        """Tenant of each running sequence."""
        self._tokens = self._answers = 0

    @property
    def tokens(self) -> int:
        """Tokens held, over all tenants."""
        return self._tokens

    @property
    def answers(self) -> int:
        """Answers held, finished or running, over all tenants."""
        return self._answers

    @property
    def tenants(self) -> int:
        """Tenants with a running sequence or an answer that is held."""
        return len(self._tenants)

    def held(self, tenant: str) -> tuple[str, ...]:
        """Names of the tenant's sequences whose answers are held, oldest first."""
        owner = self._tenants.get(self._key(tenant))
        return () if owner is None else tuple(owner.answers)

    def open(self, sequence: str, tenant: str, prompt: Sequence[int], committed: Sequence[int]) -> None:
        """A sequence begins, or goes on after `committed`; what was held of its answer is replaced."""
        self.close(sequence)
        key = self._key(tenant)
        owner = self._tenants.get(key)
        if owner is None:
            owner = self._tenants[key] = _Tenant(self._make_cache())
        if sequence in owner.answers:
            self._evict(key, sequence)
        cut = max(0, len(prompt) - PROMPT_TAIL)
        owner.cache.start_request(sequence, list(prompt[:cut]))
        owner.running.add(sequence)
        owner.answers[sequence] = 0
        self._owners[sequence] = key
        self._answers += 1
        self.extend(sequence, [*prompt[cut:], *committed])

    def extend(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed. From now on the tenant's other sequences find them, too."""
        self._tokens += self._tenants[self._owners[sequence]].add(sequence, list(tokens))
        self._shrink()

    def close(self, sequence: str) -> None:
        """A sequence ends: its own tree goes, its answer stays until it is evicted. Unknown ones are ignored."""
        key = self._owners.pop(sequence, None)
        if key is not None:
            owner = self._tenants[key]
            owner.running.discard(sequence)
            owner.cache.stop_request(sequence)
            self._drop_if_empty(key)

    def look_up(self, sequence: str, context: Sequence[int], limit: int) -> SuffixTreeDraft:
        """At most `limit` tokens that followed the end of `context` before, in this request or in the tenant's answers.

        They are no more than matched, as the library does by default.
        """
        cache = self._tenants[self._owners[sequence]].cache
        return cache.speculate(
            sequence, list(context[-DEPTH:]), limit, min_token_prob=_LEAST_PROBABILITY, use_tree_spec=True
        )

    def _key(self, tenant: str) -> str:
        return "" if self._settings.shared else tenant

    def _shrink(self) -> None:
        """Evict until the bounds hold: the oldest answer of whoever holds most of what is too much."""
        while self._tokens > self._settings.tokens:
            self._evict_oldest(max(self._tenants, key=lambda key: self._tenants[key].tokens))
        while self._answers > self._settings.answers:
            self._evict_oldest(max(self._tenants, key=lambda key: len(self._tenants[key].answers)))

    def _evict_oldest(self, key: str) -> None:
        self._evict(key, next(iter(self._tenants[key].answers)))
        self._drop_if_empty(key)

    def _evict(self, key: str, sequence: str) -> None:
        self._tokens -= self._tenants[key].evict(sequence)
        self._answers -= 1

    def _drop_if_empty(self, key: str) -> None:
        owner = self._tenants[key]
        if not owner.answers and not owner.running:
            del self._tenants[key]
