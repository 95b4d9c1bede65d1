"""A real model small enough for tests of the doors: one layer over the bytes of tiny.py, in float64."""

from __future__ import annotations

from random_llama import random_llama
from tiny import byte_codec

from actors.algorithms.grammar import GrammarCompiler
from actors.engines.lookup.predicted_draft import PredictedDraft
from actors.engines.protocol import DraftModel, TargetModel
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.transformers.target import TransformersTarget
from actors.settings import DraftSettings, TargetSettings

CODEC = byte_codec()


def model() -> CausalLM:
    """The same weights each time."""
    module = random_llama(
        CODEC.vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    return CausalLM(module.double(), name="small", eos=(0,))


def target(settings: TargetSettings) -> TargetModel:
    """With grammars."""
    backend = CODEC._tokenizer.backend_tokenizer
    return TransformersTarget(model(), settings, GrammarCompiler(backend.to_str(), CODEC.vocabulary, (0,)))


def twin(settings: DraftSettings) -> DraftModel:
    """The same weights as a draft, after the client's prediction."""
    return PredictedDraft(TransformersDraft(model(), settings), settings)
