"""The demo draft's weights at a quarter of their size: int8 with one scale per output row.

A matrix W [out, in] is kept as round(W / scale) with scale[out] = max |W[out]| / 127. Vectors stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

WEIGHTS = Path(__file__).with_name("draft.safetensors")
VOCABULARY = "draft_vocab"
_SCALE = ".scale"


def quantise(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pack floating-point matrices; what is no matrix is kept."""
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2 or not weight.is_floating_point():
            packed[name] = weight.clone()
            continue
        scale = (weight.float().abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        packed[name] = (weight.float() / scale[:, None]).round().to(torch.int8)
        packed[name + _SCALE] = scale
    return packed


def restore(packed: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of `quantise`, as `dtype`; integers that are no matrix stay as they are."""
    weights: dict[str, Tensor] = {}
    for name, weight in packed.items():
        if name.endswith(_SCALE):
            continue
        scale = packed.get(name + _SCALE)
        if scale is not None:
            weights[name] = (weight.float() * scale[:, None]).to(dtype)
        else:
            weights[name] = weight.to(dtype) if weight.is_floating_point() else weight
    return weights
