"""Linear layers for passes of a few tokens on a CPU. Knows nothing of caches, slots or sampling.

A pass over M tokens reads every weight once, so for small M it should cost what one token costs. The matrix library
behind `nn.Linear` does not get there: a row-major weight suits it for M = 1 (a matrix-vector product); from M = 2 to 3
it walks the weight once per token, and from M = 4 on it repacks the whole weight before it multiplies. oneDNN can be
given a weight that is packed already (blocks of 64 outputs, in the order they are read), and then M = 4 to 6 run at
the speed of memory. It has no fast path for M below 4, so such inputs are repeated, which costs nothing: even M = 1 is
faster than the matrix-vector product. Figures: benchmarks/LOG.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actors.engines.transformers import torch_internals

_LEAST_ROWS = 4
_COPIES = (1, 4, 2, 2)
"""Inputs of fewer rows are repeated this often. To copy is cheaper than to pad with zeros."""
_ROWS_TO_PACK_FOR = 8
"""What oneDNN is told to expect. It chooses the same layout for 2 to several hundred rows, another for 1."""


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W packed once; for inference only, on the CPU.

    Takes one linear layer, or several that share an input: their outputs are then concatenated.

    In which order a row's inputs are summed may depend on how many rows there are, and on the row's place among them;
    not on what the other rows hold. A deterministic model gives it one number of rows only (fixed_shapes.py).

    The packed weight is not a parameter: it is in no state dict, cannot be copied by `deepcopy`, and does not follow
    `model.to(...)`. Nothing differentiates through it.
    """

    def __init__(self, *layers: nn.Linear, weights: torch.dtype = torch.float32) -> None:
        """weights: float32, or bfloat16 for half the memory traffic at a loss of accuracy (sums stay float32)."""
        super().__init__()
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self.bias = _joined_bias(layers, weights)
        self._dtype = weights
        with torch.no_grad():
            joined = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
            weight = joined.detach().to(weights).contiguous()
            self._weight: Tensor = torch_internals.pack_weight(weight, _ROWS_TO_PACK_FOR)
        self._multiply: Any = torch_internals.packed_multiply()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] float32, of any strides. Returns [..., out_features] float32."""
        shape = x.shape[:-1]
        count = shape.numel()
        rows = x.reshape(count, self.in_features)
        if 0 < count < _LEAST_ROWS:
            rows = torch.cat([rows] * _COPIES[count])
        if self._dtype is torch.float32:
            out: Tensor = self._multiply(rows, self._weight, self.bias, "none", [], "")
        else:
            out = self._multiply(rows.to(self._dtype), self._weight, self.bias, "none", [], "").float()
        return out[:count].view(*shape, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self._dtype}"


def can_pack(*layers: Any) -> bool:
    """Whether these are plain float32 CPU linear layers of the same input, and this build of torch can pack them."""
    return (
        torch_internals.has_packed_linear()
        and all(type(layer) is nn.Linear for layer in layers)
        and all(layer.weight.device.type == "cpu" and layer.weight.dtype is torch.float32 for layer in layers)
        and len({layer.in_features for layer in layers}) == 1
    )


def optimise_for_small_blocks(model: nn.Module, *, weights: torch.dtype = torch.float32) -> nn.Module:
    """Make passes of a few tokens cheap on a CPU, in place. Returns `model`.

    Replaces, wherever the model's modules compute exactly what is replaced (which is tried out on random inputs
    module by module; whatever differs stays as it is):

    - `nn.Linear` by `PackedLinear`, the tied head included;
    - query, key and value projection, and gate and up projection, by one product each;
    - rotary embedding, RMS norm and gated MLP by fewer, larger operations. With thirty layers, what it costs to call
      operations is as much as a third of a single token's time.

    In float32 the logits move by rounding only: against float64 the demo model's are off by up to 1.5e-4 after this
    and by up to 0.9e-4 before it, where the largest is 35. Models in other types or on other devices are left alone:
    `nn.Linear` serves float64, and CUDA has no use for any of this. Call it once, after loading and before serving:
    the model can be run afterwards, but not saved, copied, moved, converted or trained.

    weights: bfloat16 halves the memory traffic of all linear layers, and changes the logits by about 1 %. That is for
        drafts, whose numbers nobody reads; for a target it changes what the model says.

    Memory: each weight is freed once it is packed, so the model keeps its size, plus one extra copy of the embedding
    where the head is tied to it (113 MB for 49,152 x 576 in float32, half that in bfloat16), since a lookup needs
    rows and a product needs blocks. While packing, one layer at a time exists twice.
    """
    from actors.engines.transformers.fast_blocks import FastNorm, GatedMLP, fuse_attention, replace_modules

    replace_modules(model, lambda module: fuse_attention(module, weights))
    replace_modules(model, lambda module: GatedMLP.of(module, weights))
    replace_modules(model, FastNorm.of)
    replace_modules(model, lambda module: _packed(module, weights))
    return model


def _packed(module: Any, weights: torch.dtype) -> PackedLinear | None:
    return PackedLinear(module, weights=weights) if can_pack(module) else None


def _joined_bias(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return torch.cat([part.detach() for part in parts]).to(dtype)
