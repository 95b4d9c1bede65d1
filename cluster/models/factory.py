"""From a deployment's configuration to its models and its text codec. Everything heavy is imported when it is built."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.engines.protocol import DraftModel, TargetModel
from actors.errors import ConfigError, ModelMismatchError
from actors.settings import MemorySettings
from actors.text.answer_comparison import TOLERANCE
from actors.text.codec import TextCodec
from actors.text.emulated_codec import EmulatedCodec
from cluster.config.deployment import DeploymentConfig, Resources
from cluster.models.default_sampling import default_sampling
from cluster.models.demo import Progress

if TYPE_CHECKING:
    from actors.engines.transformers.causal_lm import CausalLM
    from actors.engines.transformers.features import FeatureTap
    from actors.engines.transformers.ranks import RankGroup
    from actors.engines.vllm.runtime import VllmModel

logger = logging.getLogger(__name__)

LOW_PRECISION_TOLERANCE = 0.5
"""Near-ties in bfloat16 and float16, whose logits are rounded to about that."""


_OWN_MODEL = ("model", "retokenised", "hidden_states")
"""Kinds of drafts that draft.model names a checkpoint for."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What orchestrators and doors must know of the target: its text, its number of ids, its context, its sampling."""

    codec: TextCodec | EmulatedCodec
    vocabulary: int
    context: int
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What requests get that do not say it (default_sampling.py)."""


def target_model(config: DeploymentConfig, ranks: RankGroup | None = None) -> TargetModel:
    """Build the target, for engines that are driven pass by pass. Raises ConfigError.

    ranks: the tensor-parallel group that this process leads.
    """
    if config.target.engine == "emulated":
        from actors.engines.emulated.engines import EmulatedTarget
        from actors.engines.emulated.presets import target_spec

        spec = target_spec(config.target.model, config.target.engine_kwargs)
        return EmulatedTarget(spec, config.resolved_target(), config.target.model)
    if config.target.engine == "vllm":
        raise ConfigError("target.engine 'vllm' schedules itself: see vllm_model", "target.engine")
    return _transformers_target(config, ranks)


def target_share(config: DeploymentConfig, ranks: RankGroup) -> CausalLM:
    """What a tensor-parallel rank other than the first loads. Raises ConfigError."""
    from cluster.models.weights import load_model

    assert config.target.dtype != "auto"  # refused when the configuration was read
    return load_model(config.target.model, dtype=config.target.dtype, ranks=ranks)


def vllm_model(config: DeploymentConfig) -> VllmModel:
    """What a vLLM target is to build. Raises ConfigError."""
    from transformers import AutoConfig

    from actors.engines.vllm.plan import VllmPlan
    from actors.engines.vllm.runtime import VllmModel
    from cluster.models.references import checkpoint_end_ids, fetch, load_tokenizer, vocabulary_fingerprint

    target, settings = config.target, config.resolved_target()
    check_ranks(config)
    folder = fetch(target.model)
    described = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    tokenizer = load_tokenizer(target.model)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plan = VllmPlan(
        folder=str(folder),
        dtype=target.dtype,
        tensor_parallel_size=target.tensor_parallel_size,
        slots=settings.slots,
        context=settings.context,
        prefill=settings.prefill_chunk,
        lookahead=settings.lookahead.maximum,
        arguments=target.engine_kwargs,
    )
    return VllmModel(
        name=target.model,
        plan=plan,
        vocabulary=described.vocab_size,
        eos=checkpoint_end_ids(folder),
        fingerprint=vocabulary_fingerprint(tokenizer),
        tokenizer=backend.to_str() if backend is not None else None,
        spread=target.ranks_are_actors,
        plain_if_incompatible=target.if_incompatible == "plain",
        tolerance=TOLERANCE if target.dtype == "float32" else LOW_PRECISION_TOLERANCE,
    )


def check_ranks(config: DeploymentConfig) -> None:
    """Raises ConfigError when the target's attention heads cannot be divided among the tensor-parallel ranks."""
    from transformers import AutoConfig

    from cluster.models.references import fetch

    ranks = config.target.tensor_parallel_size
    if ranks == 1 or config.target.engine == "emulated":
        return
    described = AutoConfig.from_pretrained(str(fetch(config.target.model)), local_files_only=True).get_text_config()
    heads, kind = described.num_attention_heads, "attention heads"
    key_heads = getattr(described, "num_key_value_heads", None) or heads
    if config.target.engine == "transformers" and key_heads != heads:  # vLLM repeats them where there are more ranks
        heads, kind = math.gcd(heads, key_heads), "key heads"
    if heads % ranks:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"target.tensor_parallel_size {ranks} does not divide the {heads} {kind} of "
            f"{config.target.model}: use one of {', '.join(map(str, fits))}",
            "target.tensor_parallel_size",
        )


def _transformers_target(config: DeploymentConfig, ranks: RankGroup | None) -> TargetModel:
    from actors.algorithms.grammar import GrammarCompiler
    from actors.engines.transformers.target import TransformersTarget
    from cluster.models.references import load_tokenizer
    from cluster.models.weights import load_model

    assert config.target.dtype != "auto"  # refused when the configuration was read
    deterministic = config.target.deterministic
    model = load_model(config.target.model, dtype=config.target.dtype, ranks=ranks, deterministic=deterministic)
    tokenizer = load_tokenizer(config.target.model)
    grammars = None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        grammars = GrammarCompiler(backend.to_str(), model.vocabulary_size, model.eos)
    if deterministic:
        from actors.engines.transformers.same_bits import require_same_bits

        require_same_bits(model, config.target.settings.context)
    trees, features = not config.target.deterministic, _feature_tap(config, model)
    return TransformersTarget(model, config.resolved_target(), grammars, trees=trees, features=features)


def _feature_tap(config: DeploymentConfig, model: CausalLM) -> FeatureTap | None:
    """The target's side of a draft that reads hidden states."""
    if config.draft.kind != "hidden_states":
        return None
    from actors.engines.transformers.features import FeatureTap
    from cluster.models import feature_checkpoint
    from cluster.models.references import fetch

    text = model.module.config.get_text_config()
    layers, weight = feature_checkpoint.load_projection(fetch(config.draft.model), text)
    return FeatureTap(model.module, layers, weight)


def draft_model(config: DeploymentConfig) -> DraftModel:
    """Build the draft. Raises ConfigError."""
    if config.draft.kind == "emulated":
        from actors.engines.emulated.engines import EmulatedDraft
        from actors.engines.emulated.presets import draft_spec

        spec = draft_spec(config.draft.model, config.draft.engine_kwargs)
        return EmulatedDraft(spec, config.resolved_draft(), config.draft.model)
    if config.draft.kind == "prompt_lookup":
        return _lookup_draft(config)
    from actors.engines.lookup.predicted_draft import PredictedDraft

    return PredictedDraft(_model_draft(config), config.resolved_draft())


def _model_draft(config: DeploymentConfig) -> DraftModel:
    if config.draft.kind == "suffix":
        return _suffix_draft(config)
    if config.draft.kind == "retokenised":
        return _retokenised_draft(config)
    if config.draft.kind == "hidden_states":
        return _feature_draft(config)
    return _vllm_draft(config) if config.draft.engine == "vllm" else _transformers_draft(config)


def _transformers_draft(config: DeploymentConfig) -> DraftModel:
    draft = config.draft
    assert draft.dtype != "auto"  # refused when the configuration was read
    from actors.engines.transformers.draft import TransformersDraft
    from cluster.models.weights import load_model

    reference = config.target.model if draft.kind == "early_exit" else draft.model
    model = load_model(reference, dtype=draft.dtype, layers=draft.layers, graphs=True, compiled=draft.compile)
    return TransformersDraft(model, config.resolved_draft())


def _feature_draft(config: DeploymentConfig) -> DraftModel:
    from actors.engines.transformers.feature_draft import FeatureDraft
    from cluster.models.weights import load_feature_draft

    draft = config.draft
    assert draft.dtype != "auto"  # refused when the configuration was read
    return FeatureDraft(load_feature_draft(draft.model, config.target.model, draft.dtype), config.resolved_draft())


def _vllm_draft(config: DeploymentConfig) -> DraftModel:
    from actors.engines.protocol import ModelCard
    from actors.engines.vllm.draft import VllmDraft, VllmNextTokens
    from actors.engines.vllm.plan import check_version
    from cluster.models.references import DEMO_DRAFT, checkpoint_end_ids, fetch, load_tokenizer, vocabulary_fingerprint

    draft, settings = config.draft, config.resolved_draft()
    if draft.model == DEMO_DRAFT:
        raise ConfigError(f"{DEMO_DRAFT} has a head of its own, which vLLM does not load", "draft.engine")
    check_version()
    folder = fetch(draft.model)
    model = VllmNextTokens(str(folder), draft.dtype, settings, draft.engine_kwargs)
    fingerprint = vocabulary_fingerprint(load_tokenizer(draft.model))
    eos = checkpoint_end_ids(folder)
    card = ModelCard(draft.model, model.vocabulary, settings.context, settings.slots, eos, fingerprint)
    return VllmDraft(model, card, settings)


def _lookup_draft(config: DeploymentConfig) -> DraftModel:
    from actors.engines.lookup.prompt_lookup import LookupSettings, PromptLookupDraft

    try:
        lookup = LookupSettings(**config.draft.engine_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"draft.engine_kwargs: {error}", "draft.engine_kwargs") from error
    return PromptLookupDraft(config.resolved_draft(), lookup)


def _suffix_draft(config: DeploymentConfig) -> DraftModel:
    from actors.engines.lookup.suffix_draft import SuffixDraft
    from actors.engines.lookup.suffix_memory import SuffixMemory, suffix_caches

    memory = SuffixMemory(config.draft.memory or MemorySettings(), suffix_caches())
    return SuffixDraft(config.resolved_draft(), memory)


def _retokenised_draft(config: DeploymentConfig) -> DraftModel:
    from actors.engines.transformers.retokenised_draft import RetokenisedDraft
    from cluster.models.references import load_tokenizer
    from cluster.models.weights import load_model

    check_vocabularies(config.target.model, config.draft.model, "retokenised")
    assert config.draft.dtype != "auto"  # refused when the configuration was read
    model = load_model(config.draft.model, dtype=config.draft.dtype)
    target, draft = (TextCodec(load_tokenizer(name)) for name in (config.target.model, config.draft.model))
    return RetokenisedDraft(model, config.resolved_draft(), target=target, draft=draft, eos=target.eos)


def text_facts(config: DeploymentConfig) -> TextFacts:
    """The target's text codec and limits, without loading its weights. Raises ModelNotFoundError."""
    if config.target.engine == "emulated":
        from actors.engines.emulated.presets import target_spec

        language = target_spec(config.target.model, config.target.engine_kwargs).language
        eos = language.eos[0] if language.eos else None
        return TextFacts(
            EmulatedCodec(language.vocabulary, eos=eos),
            language.vocabulary,
            config.target.settings.context,
            default_sampling(config),
        )
    from transformers import AutoConfig

    from cluster.models.references import fetch, load_tokenizer

    described = AutoConfig.from_pretrained(str(fetch(config.target.model)), local_files_only=True).get_text_config()
    codec = TextCodec(load_tokenizer(config.target.model))
    positions = getattr(described, "max_position_embeddings", None) or config.target.settings.context
    context = min(config.target.settings.context, positions)
    return TextFacts(codec, described.vocab_size, context, default_sampling(config))


def target_fingerprint(config: DeploymentConfig) -> str:
    """Of the target's vocabulary; empty for an emulated one, whose tokens mean nothing."""
    if config.target.engine == "emulated":
        return ""
    from cluster.models.references import load_tokenizer, vocabulary_fingerprint

    return vocabulary_fingerprint(load_tokenizer(config.target.model))


def prepare(config: DeploymentConfig, progress: Progress | None = None) -> None:
    """Fetch what the models need, and see that they fit together, before anything is started.

    Raises ModelNotFoundError, ModelMismatchError when draft and target have different vocabularies, or ConfigError when
    a library that the draft needs is missing.
    """
    if config.target.engine == "emulated":
        return
    if config.draft.kind == "suffix":
        from actors.engines.lookup.suffix_memory import suffix_caches

        suffix_caches()
    from cluster.models.references import fetch

    references = [config.target.model] + ([config.draft.model] if config.draft.kind in _OWN_MODEL else [])
    for reference in references:
        fetch(reference, progress)
    check_ranks(config)
    if config.draft.kind == "hidden_states":
        from transformers import AutoConfig

        from cluster.models import feature_checkpoint

        described = AutoConfig.from_pretrained(str(fetch(config.target.model)), local_files_only=True)
        feature_checkpoint.check(fetch(config.draft.model), described.get_text_config())
    if config.draft.kind in ("model", "retokenised"):
        check_vocabularies(config.target.model, config.draft.model, config.draft.kind)


def check_vocabularies(target: str, draft: str, kind: str) -> None:
    """A model draft needs the target's vocabulary, a retokenised one has no use for it. Raises ModelMismatchError."""
    from cluster.models.references import DEMO_DRAFT, DEMO_TARGET, load_tokenizer, vocabulary_fingerprint

    same = target == draft or {target, draft} == {DEMO_TARGET, DEMO_DRAFT}
    if not same:
        same = len({vocabulary_fingerprint(load_tokenizer(reference)) for reference in (target, draft)}) == 1
    if kind == "model" and not same:
        raise ModelMismatchError(
            f"draft.model {draft} does not share the vocabulary of target.model {target}: use a draft made for this "
            "target's tokenizer, or draft.kind 'retokenised', which goes through text and accepts less",
            "draft.model",
        )
    if kind == "retokenised" and same:
        raise ModelMismatchError(
            f"draft.kind 'retokenised' is for a draft with a tokenizer of its own, and draft.model {draft} has that of "
            f"target.model {target}: use draft.kind 'model'",
            "draft.kind",
        )


def pin(resources: Resources) -> None:
    """Keep the calling thread, and those it will start, to the configured cores, priority and number of torch threads.

    Cores that this machine lacks are left out; with none left nothing is pinned. Only Linux can pin, and has
    priorities of threads.
    """
    if resources.cores is not None and hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0) & set(resources.cores)
        if cores:
            os.sched_setaffinity(0, cores)
        else:
            logger.warning("none of the cores %s is available here: not pinned", resources.cores)
    if resources.nice and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(resources.nice, os.getpriority(os.PRIO_PROCESS, thread)))
    if resources.threads is not None:
        import torch

        torch.set_num_threads(resources.threads)
