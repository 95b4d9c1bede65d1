"""A model of the demo target's shape with random weights: for what depends on shapes alone, and fetches nothing."""

from __future__ import annotations

from typing import Any


def demo_shaped_model(vocabulary: int = 49_152) -> Any:
    """30 layers of width 576 in float32. The same weights each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()
