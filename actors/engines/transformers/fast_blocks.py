"""Parts of a decoder layer in fewer operations. Each stands in for a module of transformers, found by trying it out.

Which classes compute what is not listed anywhere: a candidate is recognised by the parts it has, the replacement is
built, and both run on the same random input. Only what agrees within rounding is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from actors.engines.transformers.fast_linear import PackedLinear, can_pack
from actors.engines.transformers.transformers_internals import attention, attention_name, own_attention

_PROBE = "outrider_fusion_probe"
_PROBE_TOKENS = 5
_TOLERANCE = 3e-5
"""Relative to the largest value; float32 rounding in a sum of a few thousand terms stays below it."""

_MISFITS = (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError)
"""What a module that only looks like a candidate may raise when it is called as one."""


def replace_modules(model: nn.Module, build: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put build(module) in place of every module below `model` for which it returns one. Shared modules stay shared."""
    built: dict[int, nn.Module | None] = {}
    replaced: list[nn.Module] = []  # keeps them alive, so that no id is given twice
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in built:
                built[id(child)] = build(child)
                replaced.append(child)
            replacement = built[id(child)]
            if replacement is not None:
                setattr(parent, name, replacement)
                _release(child)


class FastNorm(nn.Module):
    """RMS norm (Zhang and Sennrich, 2019): weight * x / sqrt(mean(x²) + eps), over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._share = 1.0 / weight.numel()
        self._eps = torch.tensor(eps, dtype=weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()
        return x.mul(scale).mul_(self.weight)

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """The equal of `module`, if it is an RMS norm."""
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if isinstance(module, cls) or not isinstance(eps, float) or not isinstance(weight, nn.Parameter):
            return None
        if weight.dim() != 1 or weight.dtype is not torch.float32 or weight.device.type != "cpu":
            return None
        norm = cls(weight, eps)
        return norm if _agree(module, norm, weight.numel(), _TOLERANCE) else None


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, act: nn.Module, weights: torch.dtype) -> None:
        super().__init__()
        self.gate_up = PackedLinear(gate, up, weights=weights)
        self.down = PackedLinear(down, weights=weights)
        self.act = act
        self._split = gate.out_features

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gated: Tensor = self.act(both[..., : self._split])
        out: Tensor = self.down(gated * both[..., self._split :])
        return out

    @classmethod
    def of(cls, module: nn.Module, weights: torch.dtype) -> Self | None:
        """The equal of `module`, if it is a gated MLP of float32 linear layers."""
        parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        act = getattr(module, "act_fn", None)
        if not isinstance(act, nn.Module) or not all(isinstance(part, nn.Linear) for part in parts):
            return None
        gate, up, down = parts
        if not (can_pack(gate, up) and can_pack(down) and gate.out_features == up.out_features == down.in_features):
            return None
        mlp = cls(gate, up, down, act, weights)
        return mlp if _agree(module, mlp, gate.in_features, _tolerance(weights)) else None


class FusedAttention(nn.Module):
    """Attention of the Llama family: one product for query, key and value, one rotation for query and key.

    The cache and the attention function are called as the module it replaces called them, with that module.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any], weights: torch.dtype) -> None:
        """options: what `module` itself hands to the attention function (scaling, dropout, window)."""
        super().__init__()
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        source: Any = module
        query, key, value = source.q_proj, source.k_proj, source.v_proj
        self.qkv = PackedLinear(query, key, value, weights=weights)
        self.output = PackedLinear(source.o_proj, weights=weights)
        self.inner = source
        self._options = options
        self._size: int = source.head_dim
        self._heads = query.out_features // self._size
        self._rotated = (query.out_features + key.out_features) // self._size
        self._half = self._size // 2
        self._sign = torch.ones(self._size)
        self._sign[: self._half] = -1.0
        self._functions: Any = ALL_ATTENTION_FUNCTIONS
        self._config: Any = source.config

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [B, T, hidden]; position_embeddings: cos and sin, [B or 1, T, head_dim]."""
        shape = hidden_states.shape[:-1]
        projected = self.qkv(hidden_states).view(*shape, -1, self._size)  # [B, T, H + 2 K, D]
        cos, sin = position_embeddings
        rotated = projected[:, :, : self._rotated]
        turned = rotated.roll(self._half, -1)  # the two halves change places; the sign moves into sin
        rotated = torch.addcmul(rotated * cos.unsqueeze(2), turned, (sin * self._sign).unsqueeze(2)).transpose(1, 2)
        query, key = rotated[:, : self._heads], rotated[:, self._heads :]
        value = projected[:, :, self._rotated :].transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.inner.layer_idx)
        attend = self._functions.get_interface(attention_name(self._config), own_attention(self.inner))
        mixed, scores = attend(self.inner, query, key, value, attention_mask, **self._options, **kwargs)
        return self.output(mixed.reshape(*shape, -1)), scores


def fuse_attention(module: nn.Module, weights: torch.dtype) -> FusedAttention | None:
    """The equal of `module`, if it is attention of the Llama family in float32."""
    source: Any = module
    parts: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    needed = ("head_dim", "layer_idx", "config")
    if not all(isinstance(part, nn.Linear) for part in parts) or not all(hasattr(module, name) for name in needed):
        return None
    if not (can_pack(*parts[:3]) and can_pack(parts[3])) or source.head_dim % 2:
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _PROBE_TOKENS, source.q_proj.in_features, generator=generator)
    angles = torch.rand(1, _PROBE_TOKENS, source.head_dim // 2, generator=generator).mul(2 * math.pi).repeat(1, 1, 2)
    try:
        expected = _observe(module, hidden, angles)
        fused = FusedAttention(module, expected.pop("options"), weights)
        seen = _observe(fused, hidden, angles)
    except _MISFITS:
        return None
    same = all(_close(seen[name], expected[name], _tolerance(weights)) for name in expected)
    return fused if same else None


def _observe(module: Any, hidden: Tensor, angles: Tensor) -> dict[str, Any]:
    """What an attention module hands to the attention function, and what it makes of the answer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: dict[str, Any] = {}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        seen.update(query=query, key=key, value=value, options=options)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(_PROBE, attend)
    config = module.inner.config if isinstance(module, FusedAttention) else module.config
    with attention(config, _PROBE), torch.no_grad():
        seen["output"] = module(
            hidden_states=hidden, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None
        )[0]
    if any(isinstance(option, Tensor) and not isinstance(option, nn.Parameter) for option in seen["options"].values()):
        raise ValueError("an option of the attention function depends on the input")
    return seen


def _agree(module: nn.Module, replacement: nn.Module, size: int, tolerance: float) -> bool:
    x = torch.randn(1, _PROBE_TOKENS, size, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            return _close(replacement(x), module(x), tolerance)
    except _MISFITS:
        return False


def _close(value: Tensor, expected: Tensor, tolerance: float) -> bool:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    return bool((value - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-6))


def _tolerance(weights: torch.dtype) -> float:
    return _TOLERANCE if weights is torch.float32 else 0.05


def _release(module: nn.Module) -> None:
    """Drop the weights of linear layers that were packed, should anything still hold the module."""
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        if hasattr(module, part):
            delattr(module, part)
