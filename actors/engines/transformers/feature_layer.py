"""A draft that reads the target's hidden states: one decoder layer, fed with a token and a feature (EAGLE-3's form).

At position t it reads the embedding of token t beside a feature of position t - 1, and predicts token t + 1 (Li et al.,
"EAGLE-3", 2025, section 3). The feature is the target's, fused from hidden states of a few layers, or, where the target
has not been there yet, the layer's own output at t - 1. No feature at all is a row of zeros, which training shows it
too. Knows nothing of slots, links and training; who attends is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query [B, H, T, D], key and value [B, K, T, D], rotated. Returns [B, T, H, D]."""


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """layer: a LlamaConfig with the layer's sizes and rotary settings. target_width: of the target's hidden states.

    layers: which of them are fused: those that enter the target's layers of these numbers (vLLM counts so, too).
    norm_before_residual: whether the residual is the feature after its norm, or before.
    """

    layer: Any
    target_width: int
    layers: tuple[int, ...]
    norm_before_residual: bool = False

    @property
    def width(self) -> int:
        """Of the model, and of a fused feature."""
        return int(self.layer.hidden_size)


def default_feature_layers(depth: int) -> tuple[int, ...]:
    """Early, middle, late, of a target with `depth` layers; fewer where it has fewer."""
    return tuple(sorted({min(2, depth - 1), depth // 2, depth - 1}))


class FeatureAttention(nn.Module):
    """Projections and rotary embedding; what they attend to is the caller's matter."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, size = int(config.hidden_size), int(config.head_dim)
        heads, shared = int(config.num_attention_heads), int(config.num_key_value_heads)
        bias = bool(getattr(config, "attention_bias", False))
        self.q_proj = nn.Linear(2 * width, heads * size, bias=bias)
        self.k_proj = nn.Linear(2 * width, shared * size, bias=bias)
        self.v_proj = nn.Linear(2 * width, shared * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        self._size = size

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x: [B, T, 2 E]. rotary: cosine and sine, [B, T, D]. Returns [B, T, E]."""
        query, key, value = (
            part.unflatten(-1, (-1, self._size)).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        mixed = attend(rotated(query, rotary), rotated(key, rotary), value)
        out: Tensor = self.o_proj(mixed.flatten(-2))
        return out


class FeatureLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: Any, norm_before_residual: bool) -> None:
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        super().__init__()
        width, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.self_attn = FeatureAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, eps=eps)
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)
        self._norm_before_residual = norm_before_residual

    def forward(self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """embedded, features: [B, T, E]. Returns [B, T, E]: before the norm, what is fed back as a feature."""
        normed = self.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [B, T, 2 E]
        states = residual + self.self_attn(x, rotary, attend)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class FeatureModel(nn.Module):
    """The layer with its norm, and the target's embedding and head around it, which it does not train.

    fc belongs to the target's side: it fuses the hidden states of one position, end to end, into one feature.
    embedding: [V, E]. head: [V', E].
    """

    embedding: Tensor
    head: Tensor

    def __init__(self, shape: FeatureShape, embedding: Tensor, head: Tensor) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        self.shape = shape
        width = shape.width
        self.fc = nn.Linear(shape.target_width * len(shape.layers), width, bias=False)
        self.midlayer = FeatureLayer(shape.layer, shape.norm_before_residual)
        self.norm = LlamaRMSNorm(width, eps=float(shape.layer.rms_norm_eps))
        self.rotary = LlamaRotaryEmbedding(shape.layer)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states of shape.layers, each [..., target_width]. Returns features [..., E]."""
        fused: Tensor = self.fc(torch.cat(list(states), dim=-1))
        return fused

    def forward(self, ids: Tensor, positions: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """ids, positions: [B, T]; features: [B, T, E], of the position before each. Returns own features [B, T, E]."""
        embedded = nn.functional.embedding(ids, self.embedding.to(features.dtype))
        out: Tensor = self.midlayer(embedded, features, self.rotary(features, positions), attend)
        return out

    def score(self, own: Tensor) -> Tensor:
        """Logits [..., V'] of what follows, from own features [..., E]."""
        scores: Tensor = self.norm(own) @ self.head.T
        return scores


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x: [B, H, T, D]; halves of D turn against each other."""
    cosine, sine = (part[:, None] for part in rotary)  # [B, 1, T, D]
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-right, left], dim=-1) * sine
