"""Deterministic models: a token's logits do not depend on the block, the batch or the chunks it was computed in.

Small models in float32, because float32 is where rounding shows. What is expected of every CPU, instruction set and
number of threads (`make test-isa` tries several): the same bits, or that the check at start-up refuses the promise.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_llamas import packs_bfloat16, some_tokens
from torch import Tensor
from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.fixed_shapes import require_fixed_shapes, tiles_of
from actors.engines.transformers.same_bits import require_same_bits
from actors.engines.transformers.slots import SlotCache, SlotRow
from actors.errors import ConfigError

CONTEXT = 600
LENGTHS = (1, 2, 5, 8, 9, 17)
CHUNKS = (1, 7, 64)


def _llama(heads: int, shared: int, size: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
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
    return LlamaForCausalLM(config).to(dtype)


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=CONTEXT, n_embd=36, n_layer=2, n_head=3))


MODELS: dict[str, Any] = {
    "6 heads, 2 key heads, size 8": lambda: CausalLM(_llama(6, 2, 8), name="small", deterministic=True),
    "8 heads, 2 key heads, size 64": lambda: CausalLM(_llama(8, 2, 64), name="small", deterministic=True),
    "7 heads, 1 key head, size 32": lambda: CausalLM(_llama(7, 1, 32), name="small", deterministic=True),
    "packed bfloat16": lambda: CausalLM(_llama(4, 4, 16), name="small", packed=torch.bfloat16, deterministic=True),
    "bfloat16": lambda: CausalLM(_llama(4, 2, 16, torch.bfloat16), name="small", deterministic=True),
    "own layers": lambda: CausalLM(_llama(4, 2, 16), name="small", packed=None, deterministic=True),
    "gpt2": lambda: CausalLM(_gpt2(), name="small", deterministic=True),
}
TOKENS = [some_tokens(CONTEXT, seed) for seed in range(4)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> CausalLM:
    if request.param == "packed bfloat16" and not packs_bfloat16():
        pytest.skip("oneDNN has no products in bfloat16 for this instruction set")
    made: CausalLM = MODELS[request.param]()
    return made


@pytest.fixture(scope="module", params=[61, 510])
def start(request: pytest.FixtureRequest) -> int:
    """Length of the prefix."""
    value: int = request.param
    return value


@pytest.fixture(scope="module")
def prefilled(model: CausalLM, start: int) -> SlotCache:
    """Every slot holds its text's prefix, computed in one pass."""
    return _prefilled(model, start, start)


@pytest.fixture
def cache(prefilled: SlotCache) -> SlotCache:
    """The same, for a test to write to."""
    return copy.deepcopy(prefilled)


@pytest.fixture(scope="module")
def plain(model: CausalLM, start: int, prefilled: SlotCache) -> Tensor:
    """Logits [max(LENGTHS), V] of decoding slot 0's text, one token to a pass."""
    cache = copy.deepcopy(prefilled)
    places = range(start, start + max(LENGTHS))
    return torch.cat([model.run(cache, [SlotRow(0, TOKENS[0][i : i + 1], i)], [0]) for i in places])


def _prefilled(model: CausalLM, length: int, chunk: int) -> SlotCache:
    cache = model.cache(slots=len(TOKENS), context=CONTEXT)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        model.run(cache, [SlotRow(slot, tokens[start:stop], start) for slot, tokens in enumerate(TOKENS)], [])
    return cache


def _block(model: CausalLM, cache: SlotCache, start: int, length: int) -> Tensor:
    return model.run(cache, [SlotRow(0, TOKENS[0][start : start + length], start)], range(length))


def _assert_same_or_refused(model: CausalLM, logits: Tensor, expected: Tensor) -> None:
    if not torch.equal(logits, expected):
        with pytest.raises(ConfigError, match="cannot be promised"):
            require_same_bits(model, CONTEXT)


def test_in_a_block_of_any_length(model: CausalLM, cache: SlotCache, start: int, plain: Tensor) -> None:
    for length in LENGTHS:
        _assert_same_or_refused(model, _block(model, cache, start, length), plain[:length])


def test_beside_any_neighbours(model: CausalLM, cache: SlotCache, start: int, plain: Tensor) -> None:
    lengths = {3: 2, 0: 5, 1: 9, 2: 3}
    rows = [SlotRow(slot, TOKENS[slot][start : start + n], start) for slot, n in lengths.items()]
    logits = model.run(cache, rows, range(sum(lengths.values())))
    _assert_same_or_refused(model, logits[2:7], plain[:5])


def test_after_a_prefill_in_any_chunks(model: CausalLM, plain: Tensor, start: int) -> None:
    for chunk in CHUNKS if start < 100 else CHUNKS[-1:]:
        _assert_same_or_refused(model, _block(model, _prefilled(model, start, chunk), start, 5), plain[:5])


def test_after_a_rejected_block(model: CausalLM, cache: SlotCache, start: int, plain: Tensor) -> None:
    model.run(cache, [SlotRow(0, some_tokens(20, 99), start)], [])
    _assert_same_or_refused(model, _block(model, cache, start, 5), plain[:5])


def test_in_a_slot_whose_last_sequence_left_infinities(
    model: CausalLM, cache: SlotCache, start: int, plain: Tensor
) -> None:
    for layer in (*cache.keys, *cache.values):
        layer[0, :, start:] = torch.inf
    cache.claim(0, CONTEXT, CONTEXT)  # as a pass that wrote them would have
    _assert_same_or_refused(model, _block(model, cache, start, 3), plain[:3])


def test_with_another_number_of_threads_than_the_caller_has(
    model: CausalLM, cache: SlotCache, start: int, plain: Tensor
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        logits = _block(model, cache, start, 5)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    _assert_same_or_refused(model, logits, plain[:5])


@pytest.mark.parametrize("name", ["6 heads, 2 key heads, size 8", "gpt2"])
def test_deterministic_logits_are_those_of_other_passes_but_for_rounding(name: str) -> None:
    module = {"gpt2": _gpt2}.get(name, lambda: _llama(6, 2, 8))().double().eval()
    text = TOKENS[0][:150]
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([text])).logits[0]
    model = CausalLM(module, name="small", deterministic=True)
    rows = [SlotRow(1, TOKENS[1][:30], 0), SlotRow(0, text, 0)]
    keep = [30 + 149, 30, 30 + 77]
    logits = model.run(model.cache(slots=2, context=CONTEXT), rows, keep)
    torch.testing.assert_close(logits, expected[[149, 0, 77]], rtol=1e-6, atol=1e-6)
    assert model.run(model.cache(slots=2, context=CONTEXT), rows, []).shape == (0, 97)


def test_tiles_hold_every_token_once_at_the_place_of_its_position_and_in_order() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 12)
        rows = [SlotRow(slot, range(rng.randint(1, 30)), rng.randrange(100)) for slot in range(count)]
        tiles = tiles_of(rows)
        seen: dict[int, tuple[int, int, int]] = {}  # index in the pass: slot, position, tile
        for i, tile in enumerate(tiles):
            places = [p for s in tile for p in range(s.start % 8, s.start % 8 + len(s.tokens))]
            assert len(set(places)) == len(places)
            assert max(places) < 8
            for s in tile:
                seen |= {s.first + j: (s.slot, s.start + j, i) for j in range(len(s.tokens))}
        flat = [(row.slot, row.start + j) for row in rows for j in range(len(row.tokens))]
        assert [seen[i][:2] for i in range(len(flat))] == flat
        for i, (slot, _) in enumerate(flat[1:], 1):
            if flat[i - 1][0] == slot:
                assert seen[i][2] >= seen[i - 1][2]


def test_eight_sequences_at_different_residues_share_one_tile() -> None:
    assert len(tiles_of([SlotRow(slot, [5], 40 + 9 * slot) for slot in range(8)])) == 1
    assert len(tiles_of([SlotRow(slot, [5], 40 + 8 * slot) for slot in range(8)])) == 8


class _Rounding(CausalLM):
    """Rounds as a matrix library does that sums in another order from so many tokens on."""

    least = 0

    def run(self, cache: SlotCache, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        logits = super().run(cache, rows, keep)
        return logits + 1e-6 if sum(len(row.tokens) for row in rows) >= self.least else logits


class _RoundingAt(CausalLM):
    """Rounds otherwise where a block longer than one token begins at a position with this residue of 64."""

    residue = 0

    def run(self, cache: SlotCache, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        logits = super().run(cache, rows, keep)
        wrong = any(row.start % 64 == self.residue and len(rows) > 1 for row in rows)
        return logits + 1e-6 if wrong else logits


def test_the_check_finds_a_change_by_the_length_of_a_pass() -> None:
    for least, context in ((2, 70), (5, 300), (12, 70)):
        model = _Rounding(_llama(4, 2, 16), name="small", deterministic=True)
        model.least = least
        with pytest.raises(ConfigError, match=r"change by up to .*e-0[67] with the batch"):
            require_same_bits(model, context)


@pytest.mark.parametrize("residue", [0, 1, 31, 63])
def test_the_check_finds_a_change_at_one_residue_of_the_split_only(residue: int) -> None:
    model = _RoundingAt(_llama(4, 2, 16), name="small", deterministic=True)
    model.residue = residue
    with pytest.raises(ConfigError, match="change by up to"):
        require_same_bits(model, CONTEXT)


@pytest.mark.parametrize("context", [1, 12, 65, CONTEXT])
def test_the_check_holds_for_a_model_in_float64_at_any_context(context: int) -> None:
    model = CausalLM(_llama(4, 2, 16, torch.float64), name="small", deterministic=True)
    require_same_bits(model, context)


def test_what_passes_of_fixed_shapes_cannot_give_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = MixtralForCausalLM(MixtralConfig(vocab_size=50, num_key_value_heads=1, num_local_experts=2, **sizes))
    with pytest.raises(ConfigError, match="mixture of experts"):
        CausalLM(mixture, name="mixtral", deterministic=True)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    stretched = LlamaForCausalLM(AutoConfig.for_model("llama", vocab_size=50, rope_parameters=rope, **sizes))
    with pytest.raises(ConfigError, match="longest sequence in the pass"):
        CausalLM(stretched, name="stretched", deterministic=True)
    with pytest.raises(ConfigError, match="on cuda"):
        require_fixed_shapes(_gpt2(), "gpt2", torch.device("cuda"))
    monkeypatch.setenv("OMP_DYNAMIC", "TRUE")
    with pytest.raises(ConfigError, match="OMP_DYNAMIC"):
        CausalLM(_gpt2(), name="gpt2", deterministic=True)


def test_trees_are_refused() -> None:
    model = CausalLM(_gpt2(), name="gpt2", deterministic=True)
    with pytest.raises(ConfigError, match="no trees"):
        model.cache(slots=1, context=16, scratch=2)
    with pytest.raises(ConfigError, match="no trees"):
        model.run(model.cache(slots=1, context=16), [SlotRow(0, [1], 3, [[0]])], [0])
