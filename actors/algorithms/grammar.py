"""Structured output: which tokens a grammar allows after each prefix of a block.

The grammars are llguidance's, in its serialised form (a JSON schema, a regular expression or a Lark grammar). Masks are
taken at each position of a block as it is verified and rolled back afterwards, so that drafts need no grammar of their
own: a draft token that the grammar forbids has p = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.errors import EngineError, InvalidSettingError


class GrammarCompiler:
    """Makes matchers for one vocabulary. Building it takes up to a second for a large tokenizer: keep it.

    tokenizer: Hugging Face `tokenizers` JSON (`tokenizer.backend_tokenizer.to_str()`).
    vocabulary: columns of the logits; ids that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: str, vocabulary: int, eos: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        self._eos = tuple(eos)
        self._vocabulary = vocabulary
        self._tokenizer: Any = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos))

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of an answer. Raises InvalidSettingError if nothing can satisfy the grammar."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise InvalidSettingError(f"the grammar cannot be used: {reason}", "response_format")
        return GrammarMatcher(matcher, self._vocabulary, self._eos)


class GrammarMatcher:
    """One answer's grammar, standing at the end of what is committed."""

    def __init__(self, matcher: Any, vocabulary: int, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos = tuple(eos)
        self._bits = np.zeros((vocabulary + 31) // 32, dtype=np.int32)
        self._path: list[int] = []
        """Draft tokens past the committed ones that the matcher has followed."""
        self._ended: int | None = None
        """Length of the path at which the answer was complete; only end of text may follow."""

    def mask(self, path: Sequence[int]) -> Tensor:
        """bool [V]: what may follow the committed tokens and `path`; nothing where the path itself is not allowed."""
        if not self._follow(path):
            return torch.zeros(self._vocabulary, dtype=torch.bool)
        if self._ended is not None:
            mask = torch.zeros(self._vocabulary, dtype=torch.bool)
            mask[list(self._eos)] = True
            return mask
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocabulary].view(np.bool_))

    def advance(self, tokens: Sequence[int]) -> None:
        """`tokens` were committed. Raises EngineError if the grammar does not allow them."""
        if not self._follow(tokens):
            raise EngineError("tokens were committed that the grammar of the request does not allow")
        self._path = []
        if self._ended is not None:
            self._ended = 0

    def _follow(self, path: Sequence[int]) -> bool:
        common = 0
        while common < min(len(path), len(self._path)) and self._path[common] == path[common]:
            common += 1
        self._back_to(common)
        for token in path[common:]:
            if self._ended is None and not self._matcher.try_consume_tokens([token]):
                self._check()
                if not (token in self._eos and self._matcher.is_accepting()):
                    return False
                self._ended = len(self._path)
            elif self._ended is None and token in self._eos:
                self._ended = len(self._path) + 1
            elif self._ended is not None and token not in self._eos:
                return False
            self._path.append(token)
        return True

    def _back_to(self, length: int) -> None:
        consumed = len(self._path) if self._ended is None else min(len(self._path), self._ended)
        if consumed > length and not self._matcher.rollback(consumed - length):
            self._check()
        if self._ended is not None and self._ended > length:
            self._ended = None
        del self._path[length:]

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()[0]
            raise InvalidSettingError(f"the grammar cannot be followed: {reason}", "response_format")
