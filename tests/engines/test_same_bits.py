"""On a CPU with AVX-512, a token's logits do not depend on the block, the batch or the chunks it was computed in.

Small models in float32, because float32 is where rounding shows: with the model's own layers these comparisons fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from small_llamas import some_tokens
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.causal_lm import CausalLM
from actors.engines.slots import SlotCache, SlotRow

pytestmark = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="promised for AVX-512 only")

CONTEXT = 96


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
START = 27


def _prefilled(model: CausalLM, chunk: int = START) -> SlotCache:
    cache = model.cache(slots=len(TOKENS), context=CONTEXT)
    for slot, tokens in enumerate(TOKENS):
        for start in range(0, START, chunk):
            model.run(cache, [SlotRow(slot, tokens[start : min(start + chunk, START)], start)], [])
    return cache


def _plain(model: CausalLM, slot: int, count: int) -> Tensor:
    """Logits [count, V] of plain decoding, one token to a pass."""
    cache = _prefilled(model)
    return torch.cat(
        [model.run(cache, [SlotRow(slot, TOKENS[slot][i : i + 1], i)], [0]) for i in range(START, START + count)]
    )


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 17, 33])
def test_in_a_block_of_any_length(model: CausalLM, length: int) -> None:
    logits = model.run(_prefilled(model), [SlotRow(0, TOKENS[0][START : START + length], START)], range(length))
    assert torch.equal(logits, _plain(model, 0, length))


def test_beside_any_neighbours(model: CausalLM) -> None:
    lengths = {3: 2, 0: 5, 4: 1, 1: 9, 2: 3}
    rows = [SlotRow(slot, TOKENS[slot][START : START + n], START) for slot, n in lengths.items()]
    logits = model.run(_prefilled(model), rows, range(sum(lengths.values())))
    for part, (slot, n) in zip(logits.split(list(lengths.values())), lengths.items(), strict=True):
        assert torch.equal(part, _plain(model, slot, n))


@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
def test_after_a_prefill_in_any_chunks(model: CausalLM, chunk: int) -> None:
    logits = model.run(_prefilled(model, chunk), [SlotRow(0, TOKENS[0][START : START + 5], START)], range(5))
    assert torch.equal(logits, _plain(model, 0, 5))


def test_after_a_rejected_block(model: CausalLM) -> None:
    cache = _prefilled(model)
    model.run(cache, [SlotRow(0, some_tokens(20, 99), START)], [])
    logits = model.run(cache, [SlotRow(0, TOKENS[0][START : START + 5], START)], range(5))
    assert torch.equal(logits, _plain(model, 0, 5))


def test_in_a_slot_whose_last_sequence_left_infinities(model: CausalLM) -> None:
    cache = _prefilled(model)
    for layer in (*cache.keys, *cache.values):
        layer[0, :, START:] = torch.inf
    cache.claim(0, CONTEXT, CONTEXT)  # as a pass that wrote them would have
    logits = model.run(cache, [SlotRow(0, TOKENS[0][START : START + 3], START)], range(3))
    assert torch.equal(logits, _plain(model, 0, 3))
