"""Flat passes over slots give what separate full forward passes give."""

from __future__ import annotations

import pytest
import torch
from small_llamas import causal_lm, full_logits, module, some_tokens
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import Layout, SlotRow
from actors.errors import ConfigError

EXACT = {"rtol": 1e-6, "atol": 1e-6}
"""Float64 models of transformers still norm and rotate in float32, so passes of other shapes differ by some 1e-8."""


def test_ragged_rows_equal_separate_passes() -> None:
    model, reference = causal_lm(), module()
    cache = model.cache(slots=4, context=64)
    prompts = {3: some_tokens(17, 1), 0: some_tokens(5, 2), 2: some_tokens(1, 3)}
    rows = [SlotRow(slot, prompt, 0) for slot, prompt in prompts.items()]
    logits = model.run(cache, rows, range(23))
    expected = torch.cat([full_logits(reference, prompt) for prompt in prompts.values()])
    torch.testing.assert_close(logits, expected, **EXACT)


def test_only_the_wanted_rows_of_logits_are_made() -> None:
    model = causal_lm()
    cache = model.cache(slots=2, context=64)
    rows = [SlotRow(0, some_tokens(6, 1), 0), SlotRow(1, some_tokens(4, 2), 0)]
    everything = model.run(cache, rows, range(10))
    torch.testing.assert_close(model.run(cache, rows, [9, 5]), everything[[9, 5]], **EXACT)
    assert model.run(cache, rows, []).shape == (0, 97)


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_chunked_prefill_equals_one_prefill(chunk: int) -> None:
    model, tokens = causal_lm(), some_tokens(20, 4)
    cache = model.cache(slots=2, context=32)
    parts = []
    for start in range(0, 20, chunk):
        piece = tokens[start : start + chunk]
        parts.append(model.run(cache, [SlotRow(1, piece, start)], range(len(piece))))
    torch.testing.assert_close(torch.cat(parts), full_logits(module(), tokens), **EXACT)


def test_rollback_overwrites_what_was_cached_past_the_new_row() -> None:
    model = causal_lm()
    cache = model.cache(slots=1, context=32)
    kept, dropped, instead = some_tokens(9, 5), some_tokens(6, 6), some_tokens(3, 7)
    model.run(cache, [SlotRow(0, kept + dropped, 0)], [])
    logits = model.run(cache, [SlotRow(0, instead, 9)], range(3))
    torch.testing.assert_close(logits, full_logits(module(), kept + instead)[9:], **EXACT)


def test_a_slot_forgets_its_former_sequence() -> None:
    model = causal_lm()
    cache = model.cache(slots=1, context=32)
    model.run(cache, [SlotRow(0, some_tokens(30, 8), 0)], [])
    short = some_tokens(4, 9)
    logits = model.run(cache, [SlotRow(0, short, 0)], range(4))
    torch.testing.assert_close(logits, full_logits(module(), short), **EXACT)


def tree_rows(scratch: int) -> tuple[list[SlotRow], list[tuple[int, ...]]]:
    """Two slots with a tree of five nodes each past prefixes of 7 and 12; the token paths of all ten nodes."""
    a, b, c, d, e = 11, 12, 13, 14, 15
    paths = [(a,), (b,), (a, c), (a, d), (a, c, e)]
    cells = [[9], [3], [9, 0], [9, 7], [9, 0, 8]]
    assert max(max(path) for path in cells) < scratch
    tokens = [path[-1] for path in paths]
    return [SlotRow(1, tokens, 7, cells), SlotRow(0, tokens, 12, cells)], paths


@pytest.mark.parametrize("batched", [False, True])
def test_a_tree_equals_flat_passes_of_its_paths(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if batched:
        make = Layout.__init__

        def init(self: Layout, *args: object) -> None:
            make(self, *args)  # type: ignore[arg-type]
            self.batch()

        monkeypatch.setattr(Layout, "__init__", init)
    model, reference = causal_lm(), module()
    cache = model.cache(slots=2, context=40, scratch=10)
    prefixes = [some_tokens(7, 10), some_tokens(12, 11)]
    model.run(cache, [SlotRow(1, prefixes[0], 0), SlotRow(0, prefixes[1], 0)], [])
    rows, paths = tree_rows(10)
    logits = model.run(cache, rows, range(10))
    expected = [full_logits(reference, prefix + path)[-1] for prefix in prefixes for path in paths]
    torch.testing.assert_close(logits, torch.stack(expected), **EXACT)
    # The branch (a, c, e) comes true: its cells are copied, and the sequence goes on without the tree.
    cache.adopt(1, [9, 0, 8], 7)
    after = model.run(cache, [SlotRow(1, (20, 21), 10)], [0, 1])
    torch.testing.assert_close(after, full_logits(reference, (*prefixes[0], 11, 13, 15, 20, 21))[-2:], **EXACT)


def test_pending_tokens_and_tree_nodes_of_a_slot_run_in_one_pass() -> None:
    model = causal_lm()
    cache = model.cache(slots=1, context=40, scratch=4)
    prompt = some_tokens(8, 12)
    model.run(cache, [SlotRow(0, prompt[:5], 0)], [])
    rows = [SlotRow(0, prompt[5:], 5), SlotRow(0, (30, 31), 8, [[2], [2, 1]])]
    logits = model.run(cache, rows, range(5))
    torch.testing.assert_close(logits, full_logits(module(), (*prompt, 30, 31))[5:], **EXACT)


def test_padded_batches_equal_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_lm()
    cache = model.cache(slots=5, context=48)
    prompts = [some_tokens(n, n) for n in (9, 1, 30, 4)]
    rows = [SlotRow(slot, prompt, 0) for slot, prompt in zip((4, 1, 0, 2), prompts, strict=True)]
    single = model.run(cache, rows, range(44))
    make = Layout.__init__

    def init(self: Layout, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        self.batch([group for group in self._groups if group.slot != 1])

    monkeypatch.setattr(Layout, "__init__", init)
    torch.testing.assert_close(model.run(cache, rows, range(44)), single, **EXACT)


def test_memory_is_what_was_configured() -> None:
    cache = causal_lm().cache(slots=3, context=40, scratch=8)
    # 2 layers, keys and values, 3 slots, 2 key heads, 40 + 8 cells of head size 8, 8 bytes
    assert cache.size_in_bytes == 2 * 2 * 3 * 2 * 48 * 8 * 8


def test_a_model_with_learned_positions_and_layer_norm_runs_as_well() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2, attn_implementation="sdpa")
    tokens = [3, 7, 1, 9, 4]
    gpt = GPT2LMHeadModel(config).double().eval()
    expected = gpt(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].detach()
    model = CausalLM(gpt, name="gpt")
    cache = model.cache(slots=2, context=32)
    model.run(cache, [SlotRow(1, tokens[:3], 0)], [])
    torch.testing.assert_close(model.run(cache, [SlotRow(1, tokens[3:], 3)], [0, 1]), expected[3:], **EXACT)


def tiny(config_type: type, **extra: object) -> object:
    return config_type(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        **extra,
    )


def test_other_decoders_with_full_attention_run_as_well() -> None:
    gemma = GemmaForCausalLM(tiny(GemmaConfig)).double().eval()  # type: ignore[arg-type]
    tokens = [3, 7, 1, 9]
    expected = gemma(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].detach()
    model = CausalLM(gemma, name="gemma")
    cache = model.cache(slots=1, context=32)
    torch.testing.assert_close(model.run(cache, [SlotRow(0, tokens, 0)], range(4)), expected, **EXACT)


def test_a_sliding_window_below_the_context_is_refused() -> None:
    model = CausalLM(MistralForCausalLM(tiny(MistralConfig, sliding_window=16)), name="mistral")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sliding window of 16 tokens"):
        model.cache(slots=1, context=32)
    assert model.cache(slots=1, context=16).context == 16  # the window never bites


def test_a_recurrent_model_is_refused() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ConfigError, match="mamba"):
        CausalLM(mamba, name="mamba").cache(slots=1, context=32)


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="512 positions"):
        causal_lm().cache(slots=1, context=513)
