"""Weights in memory: a reference of references.py becomes a model that an engine can run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.errors import ConfigError, ModelNotFoundError
from cluster.models import references

if TYPE_CHECKING:
    import torch

    from actors.engines.transformers.causal_lm import CausalLM
    from actors.engines.transformers.feature_draft import FeatureLM
    from actors.engines.transformers.ranks import RankGroup
    from cluster.config.deployment import Dtype

DEMO_DRAFT_LAYERS = 4
_KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "16"}
"""On a CPU oneDNN, and torch's bridge to it, keep what they made for each layer shape and number of rows in a pass, up
to 1,024 of them by default: half a gigabyte in a day's traffic. To make one again costs less than can be measured
beside the pass that it is for (benchmarks/LOG.md)."""


def default_device() -> str:
    """`cuda` where there is one, otherwise `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    reference: str,
    *,
    dtype: Dtype = "float32",
    device: str | None = None,
    layers: int | None = None,
    draft_layers: Path | None = None,
    ranks: RankGroup | None = None,
    graphs: bool = False,
    compiled: bool = False,
    deterministic: bool = False,
) -> CausalLM:
    """Load a model for the transformers engine, fetching it where needed.

    dtype: on a CPU, `bfloat16` is the type of the weights alone, where torch has kernels for it; sums, norms and the
        cache are float32, which is faster and more accurate there than bfloat16 throughout.
    layers: keep the first so many only, with the model's own norm and head (an early exit as a draft).
    draft_layers: for the demo draft, a file of layers to use in place of the packaged ones.
    graphs: on a GPU, record small passes as CUDA graphs (a draft's steps; see actors/engines/transformers/graphs.py).
    compiled: compile those passes before they are recorded. Raises ConfigError without a GPU.
    deterministic: the same bits whatever else is in a pass, at a cost (see
        actors/engines/transformers/fixed_shapes.py). Raises ConfigError where that cannot be had.
    ranks: load this rank's share only; rank 0's model makes the others follow.
    Raises ModelNotFoundError, or ConfigError when the model is of a kind that the engine cannot run.
    """
    for name, count in _KEPT_KERNELS.items():
        os.environ.setdefault(name, count)  # read once, at the first product
    import torch

    from actors.engines.transformers.causal_lm import CausalLM
    from actors.engines.transformers.graphs import compile_pass, record_graph
    from actors.engines.transformers.torch_internals import has_packed_bfloat16

    device = device or default_device()
    if compiled and device != "cuda":
        raise ConfigError("draft.compile is for drafts on a GPU: compiled steps were slower on a CPU", "draft.compile")
    kind: torch.dtype = getattr(torch, dtype)
    packed = torch.float32
    if device == "cpu" and dtype == "bfloat16" and has_packed_bfloat16():
        kind, packed = torch.float32, torch.bfloat16
    is_demo_draft = reference == references.DEMO_DRAFT
    if is_demo_draft and layers is None:
        layers = DEMO_DRAFT_LAYERS
    module = load_module(reference, kind, layers, ranks.size if ranks is not None else 1)
    vocabulary = _adopt_demo_draft(module, kind, draft_layers) if is_demo_draft else _own_vocabulary(reference)
    facts: dict[str, Any] = {
        "name": reference,
        "eos": end_ids(module),
        "fingerprint": references.vocabulary_fingerprint(references.load_tokenizer(reference)),
        "vocabulary": vocabulary,
    }
    if ranks is None:
        record = record_graph if graphs and device == "cuda" else None
        compile = compile_pass if compiled else None
        module = module.to(device)
        return CausalLM(module, packed=packed, record=record, compile=compile, deterministic=deterministic, **facts)
    if ranks.rank > 0:
        return CausalLM(module, packed=None, **facts)
    from actors.engines.transformers.ranks import LeadingLM

    return LeadingLM(module, packed=None, group=ranks, **facts)


def load_feature_draft(reference: str, target: str, dtype: Dtype = "float32", device: str | None = None) -> FeatureLM:
    """A draft that reads the hidden states of `target`, whose embedding and head it uses where it brings none.

    dtype: see load_model. Raises ConfigError when it is no such draft, or one of another target.
    """
    import torch

    from actors.engines.transformers.feature_draft import FeatureLM
    from actors.engines.transformers.torch_internals import has_packed_bfloat16
    from cluster.models import feature_checkpoint

    device = device or default_device()
    kind: torch.dtype = getattr(torch, dtype)
    packed = torch.float32
    if device == "cpu" and dtype == "bfloat16" and has_packed_bfloat16():
        kind, packed = torch.float32, torch.bfloat16
    whole = load_module(target, torch.float32)
    module, vocabulary = feature_checkpoint.load(
        references.fetch(reference),
        whole.config.get_text_config(),
        whole.get_input_embeddings().weight.detach(),
        whole.get_output_embeddings().weight.detach(),
    )
    return FeatureLM(
        module.to(device, kind),
        name=reference,
        eos=end_ids(whole),
        fingerprint=references.vocabulary_fingerprint(references.load_tokenizer(target)),
        vocabulary=vocabulary,
        packed=packed,
    )


def load_module(reference: str, dtype: torch.dtype, layers: int | None = None, ranks: int = 1) -> Any:
    """The transformers model itself, on the CPU; with `ranks`, this process's share of it. See load_model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = str(references.fetch(reference))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config()
        if layers is not None:
            if layers > text.num_hidden_layers:
                raise ConfigError(
                    f"{reference} has {text.num_hidden_layers} layers, so {layers} of them cannot be kept"
                )
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        with _quietly():
            return AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, **_sharding(ranks)
            )
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelNotFoundError(f"{reference} cannot be loaded as a causal language model: {reason}") from error


def _sharding(ranks: int) -> dict[str, Any]:
    if ranks == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a bar per loading, nor a report of the layers that were left out on purpose."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_draft(reference: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor | None]:
    """A draft as a transformers model, on the CPU, and the ids that it may propose (None: all). See load_module."""
    if reference != references.DEMO_DRAFT:
        return load_module(reference, dtype), _own_vocabulary(reference)
    module = load_module(references.DEMO_DRAFT, dtype, DEMO_DRAFT_LAYERS)
    return module, _adopt_demo_draft(module, dtype, None)


def _adopt_demo_draft(module: Any, dtype: torch.dtype, file: Path | None) -> torch.Tensor:
    """Put the trained layers over the target's embedding and head. Returns the ids that the draft may propose."""
    from safetensors.torch import load_file

    from cluster.models.demo_draft import quantised

    weights = quantised.restore(load_file(file or quantised.WEIGHTS), dtype)
    vocabulary = weights.pop(quantised.VOCABULARY)
    unknown = module.load_state_dict(weights, strict=False).unexpected_keys
    if unknown:
        raise ConfigError(f"the demo draft does not fit the demo target: it has no {unknown[0]}")
    return vocabulary


def _own_vocabulary(reference: str) -> torch.Tensor | None:
    """The ids that a distilled draft may propose, kept beside its weights; None for any other model."""
    from cluster.distillation.student import VOCABULARY, vocabulary_file

    file = vocabulary_file(references.fetch(reference))
    if not file.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)[VOCABULARY].long()
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelNotFoundError(f"the draft vocabulary of {reference} ({file}) cannot be read: {error}") from error


def end_ids(module: Any) -> tuple[int, ...]:
    """Token ids that end an answer, as the model's own configuration has them."""
    generation = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = module.config.get_text_config().eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)
