"""The installed torch and transformers still have what the adapters beside the engine lean on."""

from __future__ import annotations

import pytest
import torch
import transformers
from small_llamas import module
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.engines.transformers import torch_internals
from actors.engines.transformers.transformers_internals import attention, attention_name, own_attention

MOVED = "has moved it: mend actors/engines/transformers/{}, and docs/private-apis.md"
TORCH = f"torch {torch.__version__} {MOVED.format('torch_internals.py')}"
TRANSFORMERS = f"transformers {transformers.__version__} {MOVED.format('transformers_internals.py')}"

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("name", ["_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported"])
def test_torch_has_the_operations(name: str) -> None:
    assert hasattr(torch.ops.mkldnn, name), TORCH


@needs_onednn
def test_a_packed_weight_multiplies_as_before() -> None:
    """Small whole numbers: sums are exact in any order."""
    weight = torch.arange(12.0).view(3, 4)
    x = torch.arange(8.0).view(2, 4)
    packed = torch_internals.pack_weight(weight, 8)
    result = torch_internals.packed_multiply()(x, packed, torch.ones(3), "none", [], "")
    # Row 0 of x is (0, 1, 2, 3), row 1 (4, 5, 6, 7); rows of the weight are (0..3), (4..7), (8..11); and 1 is added.
    assert result.tolist() == [[15.0, 39.0, 63.0], [39.0, 127.0, 215.0]], TORCH


def test_torch_answers_by_public_names() -> None:
    with torch.compiler.config.patch(recompile_limit=77):
        assert torch.compiler.config.recompile_limit == 77
    assert isinstance(torch.cpu.get_capabilities().get("avx512_bf16", False), bool)


def test_the_name_in_the_configuration_decides_which_attention_runs() -> None:
    model = module(dtype=torch.float32)
    before = attention_name(model.config)
    calls = []

    def spy(module: nn.Module, query: torch.Tensor, *rest: object, **options: object) -> tuple[torch.Tensor, None]:
        calls.append(tuple(query.shape))
        return query.transpose(1, 2), None

    AttentionInterface.register("outrider_test_spy", spy)
    with torch.no_grad(), attention(model.config, "outrider_test_spy"):
        assert attention_name(model.config) == "outrider_test_spy"
        model(torch.tensor([[1, 2, 3]]))
    assert calls == [(1, 4, 3, 8)] * 2, TRANSFORMERS  # 2 layers, 4 heads of 8
    assert attention_name(model.config) == before


def test_a_model_file_has_an_attention_of_its_own() -> None:
    layer = module().model.layers[0].self_attn
    assert callable(own_attention(layer)), TRANSFORMERS
    assert own_attention(nn.Linear(1, 1)) is None
    assert callable(ALL_ATTENTION_FUNCTIONS.get_interface), TRANSFORMERS
