"""Whether a token's logits are the same to the last bit whatever else is in the pass: found out by trying.

On a CPU with AVX-512 the engine is built so that they are (slots.py, fast_linear.py); elsewhere matrix products of
other shapes are summed in another order. Where the bits agree, no near-tie can part an answer from the one without
speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import SlotCache, SlotRow
from actors.errors import ConfigError

_PREFIXES = (5, 61, 200)
_BLOCKS = (2, 5, 9)
_CHUNK = 24
_AFTER = 9
"""Tokens decoded past each prefix: as many as the longest block."""


def require_same_bits(model: CausalLM, context: int) -> None:
    """Raises ConfigError when blocks, neighbours or chunks of a prompt change a logit of `model`. About 40 passes.

    context: longest text to try; tried are prefixes that a serving replica meets, not every length there is.
    """
    prefixes = [length for length in _PREFIXES if length + _AFTER <= context] or [max(1, context - _AFTER)]
    largest = 0.0
    for prefix in prefixes:
        tokens = [_text(model, prefix + _AFTER, seed) for seed in range(3)]
        plain = _plain(model, tokens[0], prefix)
        tried = [_block(model, tokens[0], prefix, length) for length in _BLOCKS]
        tried.append(_block(model, tokens[0], prefix, _AFTER, chunk=_CHUNK))
        tried.append(_crowded(model, tokens, prefix))
        for logits in tried:
            largest = max(largest, float((logits - plain[: len(logits)]).abs().max()))
    if largest > 0:
        raise ConfigError(
            f"target.deterministic cannot be promised here: logits of {model.name} in {model.dtype} on {model.device} "
            f"change by up to {largest:.1e} with the batch they are computed in; leave it off (near-ties are then "
            "counted), or use float32 on a CPU with AVX-512",
            "target.deterministic",
        )


def _text(model: CausalLM, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(model.vocabulary_size, (length,), generator=generator).tolist()
    return found


def _prefilled(model: CausalLM, texts: Sequence[Sequence[int]], length: int, chunk: int) -> SlotCache:
    cache = model.cache(slots=len(texts), context=length + _AFTER)
    for slot, tokens in enumerate(texts):
        for start in range(0, length, chunk):
            model.run(cache, [SlotRow(slot, tokens[start : min(start + chunk, length)], start)], [])
    return cache


def _plain(model: CausalLM, tokens: Sequence[int], prefix: int) -> Tensor:
    """Logits [_AFTER, V], one token to a pass."""
    cache = _prefilled(model, [tokens], prefix, prefix)
    places = range(prefix, prefix + _AFTER)
    return torch.cat([model.run(cache, [SlotRow(0, tokens[i : i + 1], i)], [0]) for i in places])


def _block(model: CausalLM, tokens: Sequence[int], prefix: int, length: int, chunk: int | None = None) -> Tensor:
    """Logits [length, V] of one block."""
    cache = _prefilled(model, [tokens], prefix, chunk or prefix)
    return model.run(cache, [SlotRow(0, tokens[prefix : prefix + length], prefix)], range(length))


def _crowded(model: CausalLM, texts: Sequence[Sequence[int]], prefix: int) -> Tensor:
    """Logits [4, V] of the first text, between others of other lengths."""
    cache = _prefilled(model, texts, prefix, prefix)
    lengths = {1: 1, 0: 4, 2: 7}
    rows = [SlotRow(slot, texts[slot][prefix : prefix + length], prefix) for slot, length in lengths.items()]
    return model.run(cache, rows, range(1, 5))
