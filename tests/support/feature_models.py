"""Random drafts that read hidden states, around small targets, in the target's type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.feature_draft import FeatureDraft, FeatureLM
from actors.engines.transformers.feature_layer import FeatureModel, FeatureShape
from actors.engines.transformers.features import FeatureTap
from actors.engines.transformers.target import TransformersTarget
from actors.settings import DraftSettings, TargetSettings
from cluster.distillation.feature_student import layer_config

LAYERS = (0, 1)


def feature_model(target: LlamaForCausalLM, seed: int = 0, layers: Sequence[int] = LAYERS) -> FeatureModel:
    """Its embedding and head are those of `target`."""
    torch.manual_seed(seed)
    shape = FeatureShape(layer_config(target.config), target.config.hidden_size, tuple(layers))
    made = FeatureModel(shape, target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach())
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return made.to(target.dtype)


def feeding_target(
    model: CausalLM, draft: FeatureModel, settings: TargetSettings, **options: Any
) -> TransformersTarget:
    """A target that fuses its hidden states for `draft`."""
    tap = FeatureTap(model.module, draft.shape.layers, draft.fc.weight)
    return TransformersTarget(model, settings, features=tap, **options)


def feature_draft(model: FeatureModel, settings: DraftSettings, eos: Sequence[int] = ()) -> FeatureDraft:
    """The engine."""
    return FeatureDraft(FeatureLM(model, name="features", eos=eos), settings)
