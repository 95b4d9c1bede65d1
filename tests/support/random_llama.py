"""Llamas with random weights, a few thousand of them: what tests take for a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def random_llama(vocabulary: int, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """The same weights for the same arguments, in float32. changes: fields of LlamaConfig."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "attn_implementation": "sdpa",
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **shape | changes)).eval()
