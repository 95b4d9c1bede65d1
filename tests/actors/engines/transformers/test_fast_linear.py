"""Packed and fused layers compute what the layers they replace compute, and leave alone what they cannot."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_llamas import packs_bfloat16
from torch import Tensor, nn

from actors.engines.transformers.fast_linear import PackedLinear, can_pack, optimise_for_small_blocks
from actors.engines.transformers.transformers_internals import attention

_UNIT = 2.0**-24
"""Largest relative error of one float32 rounding."""

_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (1, 1), (3, 7), (65, 33), (129, 577)]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def _linear(outputs: int, inputs: int, *, bias: bool, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.weight.copy_(torch.randn(outputs, inputs))
    return layer


def _assert_within_rounding(got: Tensor, layer: nn.Linear, x: Tensor) -> None:
    """The classical bound: a sum of n products in any order errs by at most n·u·Σ|x||w| (Higham 2002, section 3.1)."""
    exact = nn.functional.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    magnitude = x.abs().double() @ layer.weight.abs().double().T
    if layer.bias is not None:
        magnitude += layer.bias.abs().double()
    bound = (layer.in_features + 1) * 1.01 * _UNIT * magnitude
    assert got.shape == exact.shape
    assert got.dtype is torch.float32
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), _SHAPES)
def test_packed_equals_linear_within_rounding(outputs: int, inputs: int, bias: bool) -> None:
    layer = _linear(outputs, inputs, bias=bias)
    packed = PackedLinear(layer)
    x = torch.randn(33, inputs)
    for rows in range(1, 34):
        _assert_within_rounding(packed(x[:rows]), layer, x[:rows])


def test_packed_takes_any_layout_and_any_leading_dimensions() -> None:
    layer = _linear(65, 40, bias=True)
    packed = PackedLinear(layer)
    base = torch.randn(6, 80, 5)
    for x in (
        base[:, :40].transpose(1, 2),  # [6, 5, 40], strides (400, 1, 5)
        torch.randn(40, 3).T,  # columns as rows
        torch.randn(12, 80)[::3, ::2],  # every third row, every second entry
        torch.randn(1, 40).expand(5, 40),  # one row seen five times
        torch.randn(40),  # no leading dimension
        torch.randn(2, 1, 3, 40),
        torch.randn(0, 40),  # nothing
    ):
        _assert_within_rounding(packed(x), layer, x)


def test_joined_layers_are_laid_end_to_end() -> None:
    first, second, third = (
        _linear(8, 16, bias=False, seed=1),
        _linear(4, 16, bias=True, seed=2),
        _linear(2, 16, bias=False, seed=3),
    )
    x = torch.randn(5, 16)
    out = PackedLinear(first, second, third)(x)
    for layer, part in zip((first, second, third), out.split([8, 4, 2], dim=-1), strict=True):
        _assert_within_rounding(part, layer, x)


@pytest.mark.skipif(not packs_bfloat16(), reason="oneDNN has no products in bfloat16 for this instruction set")
def test_bfloat16_weights_round_the_operands_only() -> None:
    """Two operands rounded to 8 bits and a result rounded to 8 bits: each errs by 2^-9 at most, relatively."""
    layer = _linear(64, 64, bias=False)
    x = torch.randn(5, 64)
    got = PackedLinear(layer, weights=torch.bfloat16)(x)
    exact = x.double() @ layer.weight.double().T
    magnitude = x.abs().double() @ layer.weight.abs().double().T
    assert got.dtype is torch.float32
    assert bool(((got.double() - exact).abs() <= 2.1 * 2**-9 * magnitude + 1.1 * 2**-9 * exact.abs()).all())


@pytest.mark.parametrize(("outputs", "inputs"), _SHAPES)
def test_in_a_product_of_one_shape_a_row_does_not_depend_on_the_others(outputs: int, inputs: int) -> None:
    """What fixed_shapes.py builds on, under any instruction set and with any number of threads."""
    packed = PackedLinear(_linear(outputs, inputs, bias=False))
    x = torch.randn(8, inputs)
    expected = packed(x)
    for place in range(8):
        others = 1e3 * torch.randn(8, inputs)
        others[place] = x[place]
        assert torch.equal(packed(others)[place], expected[place])


def test_only_float32_linear_layers_of_one_input_can_be_packed() -> None:
    plain = nn.Linear(4, 6)

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    assert can_pack(plain)
    assert can_pack(plain, nn.Linear(4, 3, bias=False))
    assert not can_pack(plain, nn.Linear(5, 6))
    assert not can_pack(nn.Linear(4, 6, dtype=torch.float64))
    assert not can_pack(nn.Linear(4, 6, dtype=torch.bfloat16))
    assert not can_pack(nn.Linear(4, 6, device="meta"))
    assert not can_pack(Scaled(4, 6))
    assert not can_pack(nn.Embedding(4, 6))


def _causal_lm(family: str, **overrides: Any) -> Any:
    """A small model with weights large enough that every part of a layer moves the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **(settings | overrides))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def _kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


_IDS = torch.tensor([[5, 17, 99, 3, 64, 2, 17]])


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3", "gemma", "smollm3", "olmo2", "phi3"])
def test_logits_move_by_rounding_only(family: str) -> None:
    model = _causal_lm(family)
    expected = model(_IDS).logits
    assert optimise_for_small_blocks(model) is model
    assert _kinds(model)["Linear"] == 0
    assert expected.abs().max() > 0.5
    assert float((model(_IDS).logits - expected).abs().max()) <= 5e-5


def test_a_llama_is_replaced_throughout() -> None:
    model = optimise_for_small_blocks(_causal_lm("llama"))
    kinds = _kinds(model)
    assert kinds["FusedAttention"] == kinds["GatedMLP"] == 2
    assert kinds["FastNorm"] == 2 * 2 + 1
    assert kinds["PackedLinear"] == 2 * (2 + 2) + 1


def test_what_only_looks_alike_stays() -> None:
    """Gemma scales by 1 + weight, Qwen3 and OLMo 2 norm queries and keys, SmolLM3 has layers without rotation."""
    assert _kinds(optimise_for_small_blocks(_causal_lm("gemma")))["FastNorm"] == 0
    for family in ("qwen3", "olmo2"):
        kinds = _kinds(optimise_for_small_blocks(_causal_lm(family)))
        assert kinds["FusedAttention"] == 0
        assert kinds["GatedMLP"] == 2
    kinds = _kinds(optimise_for_small_blocks(_causal_lm("smollm3", no_rope_layers=[1, 0])))
    assert kinds["FusedAttention"] == 1


def test_a_gated_mlp_of_another_formula_stays() -> None:
    class Inverted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
            self.down_proj, self.act_fn = nn.Linear(12, 8), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
            return out

    model = nn.ModuleDict({"mlp": Inverted()})
    x = torch.randn(3, 8)
    expected = model["mlp"](x)
    optimise_for_small_blocks(model)
    assert isinstance(model["mlp"], Inverted)
    assert _kinds(model)["PackedLinear"] == 3
    assert torch.allclose(model["mlp"](x), expected, atol=1e-6)


@pytest.mark.parametrize("kept", [torch.float64, torch.bfloat16])
def test_other_types_fall_back_to_what_they_were(kept: torch.dtype) -> None:
    model = _causal_lm("llama").to(kept)
    before, expected = _kinds(model), model(_IDS).logits
    optimise_for_small_blocks(model)
    assert _kinds(model) == before
    assert torch.equal(model(_IDS).logits, expected)


def test_the_cache_and_the_attention_function_see_what_they_saw() -> None:
    """A prefix in the cache and a block after it; and the window of a sliding layer still reaches the function."""
    from transformers import AttentionInterface, DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model = _causal_lm("mistral", sliding_window=3)
    seen: list[tuple[int, Any, Any, Any]] = []

    def spy(module: Any, *args: Any, **options: Any) -> Any:
        seen.append((module.layer_idx, options["sliding_window"], options["scaling"], options["note"]))
        return sdpa_attention_forward(module, *args, **options)

    def run(model: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(_IDS[:, :4], past_key_values=cache, note="prefix")
        logits: Tensor = model(_IDS[:, 4:], past_key_values=cache, note="block").logits
        return logits

    AttentionInterface.register("spy", spy)
    with attention(model.config, "spy"):
        expected = run(model)
        reported = seen.copy()
        seen.clear()
        got = run(optimise_for_small_blocks(model))
    assert reported == [(i, 3, 8**-0.5, note) for note in ("prefix", "block") for i in (0, 1)]
    assert seen == reported
    assert float((got - expected).abs().max()) <= 5e-5


def test_a_tied_head_keeps_the_embedding_and_frees_the_rest() -> None:
    model = _causal_lm("llama")
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    embedding = model.model.embed_tokens.weight
    assert any(weight is embedding for weight in weights)
    optimise_for_small_blocks(model)
    assert model.model.embed_tokens.weight is embedding
    left = sum(parameter.numel() for parameter in model.parameters())
    norms = 5 * 48
    assert left == embedding.numel() + norms


def test_a_layer_used_twice_is_packed_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    x = torch.randn(2, 4)
    expected = copy.deepcopy(model)(x)
    optimise_for_small_blocks(model)
    inner: Any = model[1]
    assert model[0] is inner[1]
    assert torch.allclose(model(x), expected, atol=1e-6)


def test_other_modules_are_left_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Conv1d(3, 3, 1))
    before = [type(module) for module in model]
    optimise_for_small_blocks(model)
    assert [type(module) for module in model] == before
