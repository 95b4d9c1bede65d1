"""On a CPU with AVX-512, a token's logits do not depend on the block, the batch or the chunks it was computed in.

Small models in float32, because float32 is where rounding shows: with the model's own layers these comparisons fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from small_llamas import some_tokens
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.same_bits import require_same_bits
from actors.engines.transformers.slots import SlotCache, SlotRow
from actors.errors import ConfigError

pytestmark = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="promised for AVX-512 only")

CONTEXT = 700


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _model(heads: int, shared: int, size: int) -> CausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=8 * heads,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=size,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    return CausalLM(LlamaForCausalLM(config), name="small")


@pytest.fixture(scope="module", params=[(6, 2, 8), (4, 4, 16), (8, 2, 64), (7, 1, 32)], ids=str)
def model(request: pytest.FixtureRequest) -> CausalLM:
    """Query heads, key heads, head size."""
    return _model(*request.param)


TOKENS = [some_tokens(CONTEXT, seed) for seed in range(5)]


@pytest.fixture(params=[27, 190, 301, 383, 510], ids=str)
def start(request: pytest.FixtureRequest) -> int:
    """Length of the prefix: also where the rounded number of cells jumps."""
    value: int = request.param
    return value


def _prefilled(model: CausalLM, length: int, chunk: int | None = None) -> SlotCache:
    cache = model.cache(slots=len(TOKENS), context=CONTEXT)
    step = chunk or length
    for slot, tokens in enumerate(TOKENS):
        for start in range(0, length, step):
            model.run(cache, [SlotRow(slot, tokens[start : min(start + step, length)], start)], [])
    return cache


def _plain(model: CausalLM, slot: int, start: int, count: int) -> Tensor:
    """Logits [count, V] of plain decoding, one token to a pass."""
    cache = _prefilled(model, start)
    return torch.cat(
        [model.run(cache, [SlotRow(slot, TOKENS[slot][i : i + 1], i)], [0]) for i in range(start, start + count)]
    )


def _block(model: CausalLM, cache: SlotCache, start: int, length: int) -> Tensor:
    return model.run(cache, [SlotRow(0, TOKENS[0][start : start + length], start)], range(length))


def test_in_a_block_of_any_length(model: CausalLM, start: int) -> None:
    expected = _plain(model, 0, start, 33)
    for length in (1, 2, 3, 4, 5, 8, 9, 17, 33):
        logits = _block(model, _prefilled(model, start), start, length)
        assert torch.equal(logits, expected[:length])


def test_beside_any_neighbours(model: CausalLM, start: int) -> None:
    lengths = {3: 2, 0: 5, 4: 1, 1: 9, 2: 3}
    rows = [SlotRow(slot, TOKENS[slot][start : start + n], start) for slot, n in lengths.items()]
    logits = model.run(_prefilled(model, start), rows, range(sum(lengths.values())))
    for part, (slot, n) in zip(logits.split(list(lengths.values())), lengths.items(), strict=True):
        assert torch.equal(part, _plain(model, slot, start, n))


def test_after_a_prefill_in_any_chunks(model: CausalLM, start: int) -> None:
    expected = _plain(model, 0, start, 5)
    for chunk in (7, 16, 64, 256):
        assert torch.equal(_block(model, _prefilled(model, start, chunk), start, 5), expected)


def test_after_a_prefill_token_by_token(model: CausalLM) -> None:
    assert torch.equal(_block(model, _prefilled(model, 220, chunk=1), 220, 5), _plain(model, 0, 220, 5))


def test_after_a_rejected_block(model: CausalLM, start: int) -> None:
    cache = _prefilled(model, start)
    model.run(cache, [SlotRow(0, some_tokens(20, 99), start)], [])
    assert torch.equal(_block(model, cache, start, 5), _plain(model, 0, start, 5))


def test_in_a_slot_whose_last_sequence_left_infinities(model: CausalLM, start: int) -> None:
    cache = _prefilled(model, start)
    for layer in (*cache.keys, *cache.values):
        layer[0, :, start:] = torch.inf
    cache.claim(0, CONTEXT, CONTEXT)  # as a pass that wrote them would have
    assert torch.equal(_block(model, cache, start, 3), _plain(model, 0, start, 3))


class _Rounding(CausalLM):
    """Rounds as a matrix library does that sums in another order from so many tokens on."""

    least = 0

    def run(self, cache: SlotCache, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        logits = super().run(cache, rows, keep)
        return logits + 1e-6 if sum(len(row.tokens) for row in rows) >= self.least else logits


def test_a_target_that_must_be_deterministic_finds_out_whether_it_is() -> None:
    model = _model(4, 2, 16)
    require_same_bits(model, 300)
    require_same_bits(model, 12)
    model.__class__ = _Rounding
    for least in (2, 5, 9, 12):
        model.least = least  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"change by up to 9\.\de-07|change by up to 1\.\de-06"):
            require_same_bits(model, 300)
