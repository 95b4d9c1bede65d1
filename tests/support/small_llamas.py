"""Random models of a few thousand weights in float64, and forward passes computed without slots to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from random_llama import random_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.fast_linear import PackedLinear
from actors.messages import OpenSequence
from actors.settings import SamplingSettings

VOCABULARY = 97
EOS = 2


def module(
    seed: int = 0, *, layers: int = 2, dtype: torch.dtype = torch.float64, sharpness: float = 1.0
) -> LlamaForCausalLM:
    """A Llama with grouped heads. sharpness: factor on the head's weights, to make its choices more certain."""
    layout = {"num_hidden_layers": layers, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS}
    model = random_llama(VOCABULARY, seed, **layout).to(dtype)
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    return model


def causal_lm(
    seed: int = 0, *, eos: Sequence[int] = (), vocabulary: Tensor | None = None, **options: object
) -> CausalLM:
    """The same model, for slots."""
    return CausalLM(module(seed, **options), name=f"llama-{seed}", eos=eos, vocabulary=vocabulary)  # type: ignore[arg-type]


@torch.inference_mode()
def full_logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), V] of one plain forward pass without any cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def packs_bfloat16() -> bool:
    """Whether oneDNN multiplies packed bfloat16 weights; what it may use is cut by ONEDNN_MAX_CPU_ISA."""
    try:
        with torch.no_grad():
            PackedLinear(torch.nn.Linear(8, 8), weights=torch.bfloat16)(torch.ones(8, 8))
    except RuntimeError:
        return False
    return True


def some_tokens(count: int, seed: int) -> tuple[int, ...]:
    """Token ids other than EOS."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


def opening(name: str, prompt: Sequence[int], seed: int = 0, **sampling: object) -> OpenSequence:
    """A request."""
    return OpenSequence(name, tuple(prompt), SamplingSettings(**sampling), seed)  # type: ignore[arg-type]
