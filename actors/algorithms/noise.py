"""Counter-based noise: a pure function of (stream, seed, position, token), with no state and no generator to advance.

The integers are the same on every device, in every batch and for every subset of the vocabulary, so that draft and
target can share noise without exchanging it, and a replica that takes over continues where another left off.

Construction. Stream, seed and position (and a salt, where one is given) are absorbed by the splitmix64 finaliser
(Steele, Lea, Flood 2014) into a 64-bit row key; a token becomes a 32-bit word by a bijective mixer. A row's word for
a token is mix32((token_word ^ low) * (high | 1) + low), with the halves of the row key; for any one row this is again
a bijection of the token. The mixers use multipliers of C. Wellons' "hash prospector" search. All of it is 32-bit
integer arithmetic, which vectorises on CPUs that have no 64-bit multiply.

Resolution. A word w stands for the uniform v = w / 2^32. The exponential variate is E = -log(1 - v) and the Gumbel
variate is g = -log E, so *small* v are the ones that win an argmax, and there float32 keeps all 32 bits: w = 0 counts
as half a step, and g spans [-2.82, 22.88] in float32 and [-3.14, 22.88] in float64; it is never infinite. A token's
probability is reproduced to within 2^-32 absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_TOKEN_OFFSET = 0x3C6EF372
_TOKEN_ROUNDS = ((0x21F0AAAD, 16), (0x735A2D97, 15))
_ROW_ROUNDS = ((16, 0x7FEB352D), (15, 0x2C1B3C6D))
_STEP = 2.0**-32
_SMALLEST = 2.0**-33
_LARGEST = {torch.float32: 1 - 2.0**-24, torch.float64: 1 - 2.0**-33}


class Stream(IntEnum):
    """What a number is used for. Different streams are independent.

    SHARED: the noise that draft and target share under the coupled rule. The other three belong to the
    probabilistic rules, whose proof needs the draft token, its acceptance and its correction to be independent.
    """

    SHARED = 1
    DRAFT = 2
    ACCEPTANCE = 3
    CORRECTION = 4


def row_key(seed: int, position: int, stream: Stream = Stream.SHARED, salt: int = 0) -> int:
    """64-bit key of one row of noise. `seed` up to 63 bits; `salt` (any 64 bits) tells apart rows of one position."""
    key = _mix64((seed + stream * _GOLDEN) & _MASK)
    key = _mix64((key ^ position) & _MASK)
    return _mix64((key + _GOLDEN ^ salt) & _MASK)


def uniform(seed: int, position: int, stream: Stream, salt: int = 0) -> float:
    """One number, uniform on (0, 1), of 53 bits: what the acceptance tests of the probabilistic rules compare with."""
    return ((_mix64(row_key(seed, position, stream, salt) ^ _GOLDEN) >> 11) + 0.5) * 2.0**-53


def words(keys: Sequence[int], tokens: Tensor) -> Tensor:
    """The noise itself: int32 [N, M], to be read as unsigned. `tokens` is [M] or [N, M], of any integer type."""
    rows = torch.empty(len(keys), tokens.shape[-1], dtype=torch.int32, device=tokens.device)
    _fill_words(keys, mix_tokens(tokens), rows, torch.empty_like(rows))
    return rows


def gumbel_of(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """g [M] of one row at a few tokens, in double precision and without torch, whose calls cost more than the work."""
    token_words = tokens.astype(np.uint32) + np.uint32(_TOKEN_OFFSET)
    for multiplier, shift in _TOKEN_ROUNDS:
        token_words = (token_words ^ token_words >> np.uint32(shift)) * np.uint32(multiplier)
    token_words ^= token_words >> np.uint32(15)
    row = np.empty_like(token_words)
    _fill_row(key, token_words, row, np.empty_like(row))
    return gumbel_of_words(row)


def gumbel_of_words(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """g, in double precision, of noise words."""
    v = np.clip(words * _STEP, _SMALLEST, 1 - _SMALLEST)
    negated: NDArray[np.float64] = np.log(-np.log1p(-v))
    return -negated


def gumbel(
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    stream: Stream = Stream.SHARED,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gumbel(0, 1) noise [N, M] in float32 or float64.

    seeds, positions: int64 [N]. tokens: [M], or [N, M] where every row asks for tokens of its own.
    """
    keys = [row_key(s, p, stream) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    return gumbel_rows(keys, tokens, dtype=dtype)


def gumbel_rows(keys: Sequence[int], tokens: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `gumbel`, for rows whose keys (`row_key`) are at hand."""
    if tokens.device.type != "cpu" or tokens.dim() > 1:
        return NoiseSource(tokens, dtype, rows=len(keys)).negated(keys).neg_()
    source = NoiseSource(tokens, dtype)
    rows = torch.empty(len(keys), tokens.shape[-1], dtype=dtype)
    for row, key in zip(rows, keys, strict=True):
        torch.neg(source.negated([key])[0], out=row)
    return rows


class NoiseSource:
    """Noise for one set of tokens, `rows` rows at a time, in buffers that are used again.

    On a CPU one row at a time is fastest, because the buffers then stay in the cache.
    tokens: [M], or [rows, M] where every row asks for tokens of its own; an int M stands for the ids below it.
    """

    def __init__(
        self,
        tokens: Tensor | int,
        dtype: torch.dtype = torch.float32,
        rows: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self._token_words = _words_of_ids(tokens, device) if isinstance(tokens, int) else mix_tokens(tokens)
        shape, device = (rows, self._token_words.shape[-1]), self._token_words.device
        self._words = torch.empty(shape, dtype=torch.int32, device=device)
        self._scratch = torch.empty(shape, dtype=torch.int32, device=device)
        self._dtype = dtype

    def words(self, keys: Sequence[int]) -> Tensor:
        """int32 [rows, M], a view that the next call overwrites. One key (`row_key`) per row."""
        _fill_words(keys, self._token_words, self._words, self._scratch)
        return self._words

    def negated_exponential(self, keys: Sequence[int]) -> Tensor:
        """-E [rows, M], freshly made."""
        return negated_exponential(self.words(keys), self._dtype)

    def negated(self, keys: Sequence[int]) -> Tensor:
        """-g [rows, M], freshly made."""
        return self.negated_exponential(keys).neg_().log_()


def negated_exponential(words: Tensor, dtype: torch.dtype) -> Tensor:
    """-E = log(1 - v) of noise words (int32, any shape), in float32 or float64."""
    row = words.to(dtype)  # signed, so that words near 0 (the winners) keep all their bits in float32
    row.mul_(-_STEP)
    row.sub_(row.ceil())  # -v in (-1, 0]
    return row.clamp_(-_LARGEST[dtype], -_SMALLEST).log1p_()


@lru_cache(maxsize=8)
def _words_of_ids(size: int, device: torch.device | None) -> Tensor:
    return mix_tokens(torch.arange(size, device=device))


def mix_tokens(tokens: Tensor) -> Tensor:
    """A bijection of 32-bit words (two rounds of xor-shift and multiply), so that neighbouring ids share nothing."""
    word = tokens.to(torch.int32) + _TOKEN_OFFSET
    for multiplier, shift in _TOKEN_ROUNDS:
        word = (word ^ _shifted(word, shift)) * multiplier
    return word ^ _shifted(word, 15)


def _fill_words(keys: Sequence[int], token_words: Tensor, out: Tensor, scratch: Tensor) -> None:
    if out.device.type != "cpu":
        _fill_words_at_once(keys, token_words, out, scratch)
        return
    sources, rows = token_words.numpy().view(np.uint32), out.numpy().view(np.uint32)
    spare = scratch[0].numpy().view(np.uint32) if keys else None
    for n, key in enumerate(keys):
        assert spare is not None
        _fill_row(key, sources if sources.ndim == 1 else sources[n], rows[n], spare)


def _fill_row(key: int, token_words: NDArray[np.uint32], out: NDArray[np.uint32], scratch: NDArray[np.uint32]) -> None:
    """On a CPU: NumPy has unsigned shifts, and smaller overheads."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 | 1)
    np.bitwise_xor(token_words, low, out=out)
    np.multiply(out, high, out=out)
    np.add(out, low, out=out)
    for shift, multiplier in _ROW_ROUNDS:
        np.right_shift(out, np.uint32(shift), out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        np.multiply(out, np.uint32(multiplier), out=out)
    np.right_shift(out, np.uint32(16), out=scratch)
    np.bitwise_xor(out, scratch, out=out)


def _fill_words_at_once(keys: Sequence[int], token_words: Tensor, out: Tensor, scratch: Tensor) -> None:
    """On a device: all rows in each launch. The same integers, with masked shifts because torch's are signed."""
    halves = [[_signed(key & 0xFFFFFFFF), _signed(key >> 32 | 1)] for key in keys]
    low, high = torch.tensor(halves, dtype=torch.int32, device=out.device).reshape(-1, 2, 1).unbind(1)  # [N, 1]
    torch.bitwise_xor(token_words, low, out=out)
    out.mul_(high).add_(low)
    for shift, multiplier in _ROW_ROUNDS:
        torch.bitwise_right_shift(out, shift, out=scratch)
        scratch.bitwise_and_((1 << (32 - shift)) - 1)
        out.bitwise_xor_(scratch).mul_(multiplier)
    torch.bitwise_right_shift(out, 16, out=scratch)
    out.bitwise_xor_(scratch.bitwise_and_(0xFFFF))


def _shifted(word: Tensor, shift: int) -> Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return word >> shift & ((1 << (32 - shift)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * _MULTIPLIER_1 & _MASK
    z = (z ^ (z >> 27)) * _MULTIPLIER_2 & _MASK
    return z ^ (z >> 31)
