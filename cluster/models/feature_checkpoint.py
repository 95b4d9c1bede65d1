"""Hidden-state drafts on disk, in EAGLE-3's layout: config.json and model.safetensors or pytorch_model.bin.

Read are the layout of SafeAILab/EAGLE (the layer's weights under `midlayer.`, sizes at the top of config.json) and that
of vLLM's `speculators` (`layers.0.`, sizes under `transformer_layer_config`). `d2t` [V'] int64 has, for each column of
the head, the target's token id less the column; `t2d` [V] bool says which ids have a column. Embedding and head may be
left out; they are then the target's. Written is the former layout, without these two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actors.errors import ConfigError

if TYPE_CHECKING:
    from actors.engines.transformers.feature_layer import FeatureModel, FeatureShape

ARCHITECTURE = "LlamaForCausalLMEagle3"
_WEIGHTS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def read_shape(folder: Path, target: Any) -> FeatureShape:
    """What config.json says. target: the target's text configuration. Raises ConfigError."""
    from transformers import LlamaConfig

    from actors.engines.transformers.feature_layer import FeatureShape

    file = folder / "config.json"
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        sizes = told.get("transformer_layer_config", told)
        ids = told.get(_LAYER_IDS) or (told.get("eagle_config") or {}).get(_LAYER_IDS)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as the configuration of a hidden-state draft: {error}") from error
    known = {**told, **sizes, **(told.get("eagle_config") or {})}
    if odd := [name for name in _UNSUPPORTED if known.get(name)]:
        raise ConfigError(f"{file} asks for {odd[0]}, which hidden-state drafts are not run with here")
    if int(sizes.get("num_hidden_layers", 1)) != 1:
        raise ConfigError(f"{file}: num_hidden_layers is {sizes['num_hidden_layers']}; drafts of one layer are run")
    if missing := [name for name in ("hidden_size", "num_attention_heads", "intermediate_size") if name not in sizes]:
        raise ConfigError(f"{file} has no {missing[0]}")
    depth, width = int(target.num_hidden_layers), int(told.get("target_hidden_size") or sizes["hidden_size"])
    if width != target.hidden_size or int(sizes["hidden_size"]) != target.hidden_size:
        raise ConfigError(
            f"{file} is of a draft for a target of width {width}, drafting at width {sizes['hidden_size']}; "
            f"this target's width is {target.hidden_size}, and both must be that"
        )
    layers = tuple(int(n) for n in ids) if ids else (2, depth // 2, depth - 3)  # as vLLM takes them where none are told
    if bad := [n for n in layers if not 0 <= n < depth]:
        raise ConfigError(f"{file} names layer {bad[0]}, but the target has layers 0 to {depth - 1}")
    layer = LlamaConfig.from_dict({**sizes, "num_hidden_layers": 1})
    return FeatureShape(layer, width, layers, bool(told.get("norm_before_residual", False)))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors, the layer's under `midlayer.` whichever layout it is. Raises ConfigError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / _WEIGHTS
    if not file.is_file():
        file = folder / _PICKLED
    if not file.is_file():
        raise ConfigError(f"{folder} holds neither {_WEIGHTS} nor {_PICKLED}")
    try:
        pickled = file.name == _PICKLED
        weights = torch.load(file, weights_only=True, map_location="cpu") if pickled else load_file(file)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ConfigError(f"{file} is damaged: {next(iter(str(error).splitlines()), '')}") from error
    return {_plain_name(name): weight for name, weight in weights.items()}


def read_vocabulary(weights: Mapping[str, Tensor], size: int, source: str) -> Tensor | None:
    """Sorted target ids, int64 [V'], of the head's rows; None for all. size: V. Raises ConfigError."""
    d2t, t2d = weights.get("d2t"), weights.get("t2d")
    if d2t is None and t2d is None:
        return None
    if d2t is None:
        raise ConfigError(f"{source} has a t2d and no d2t")
    if d2t.ndim != 1 or d2t.is_floating_point():
        raise ConfigError(f"{source}: d2t must be a row of whole numbers, not {d2t.dtype} {list(d2t.shape)}")
    ids = d2t.long() + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ConfigError(f"{source}: d2t leads to id {int(ids.max())}, but the target has {size} ids")
    if bool((ids[1:] <= ids[:-1]).any()):
        raise ConfigError(f"{source}: d2t does not lead to rising ids")
    if t2d is not None:
        if t2d.shape != (size,):
            raise ConfigError(f"{source}: t2d has shape {list(t2d.shape)}, the target {size} ids")
        if not torch.equal(t2d.bool().nonzero()[:, 0], ids):
            raise ConfigError(f"{source}: t2d marks other ids than d2t leads to")
    return ids


def load(folder: Path, target: Any, embedding: Tensor, head: Tensor) -> tuple[FeatureModel, Tensor | None]:
    """The draft in float32, on the CPU, and the ids that it may propose.

    target: the target's text configuration. embedding, head: [V, E], the target's. Raises ConfigError, in one line
    that names the tensor.
    """
    from actors.engines.transformers.feature_layer import FeatureModel

    shape, weights, source = read_shape(folder, target), read_weights(folder), str(folder)
    size = int(embedding.shape[0])
    vocabulary = read_vocabulary(weights, size, source)
    rows = size if vocabulary is None else len(vocabulary)
    own_head = weights.get("lm_head.weight")
    if own_head is None:
        own_head = head if vocabulary is None else head[vocabulary]
    own_embedding = weights.get("embed_tokens.weight", embedding)
    for name, tensor, expected in (
        ("lm_head.weight", own_head, (rows, shape.width)),
        ("embed_tokens.weight", own_embedding, (size, shape.width)),
    ):
        if tuple(tensor.shape) != expected:
            raise ConfigError(f"{source}: {name} has shape {list(tensor.shape)}, not {list(expected)}")
    module = FeatureModel(shape, own_embedding.float(), own_head.float())
    for name, parameter in module.named_parameters():
        weight = weights.get(name)
        if weight is None:
            raise ConfigError(f"{source} has no tensor {name}")
        if weight.shape != parameter.shape:
            raise ConfigError(f"{source}: {name} has shape {list(weight.shape)}, not {list(parameter.shape)}")
        if not bool(weight.isfinite().all()):
            raise ConfigError(f"{source}: {name} holds numbers that are not finite")
        parameter.data = weight.float()
    return module, vocabulary


def load_projection(folder: Path, target: Any) -> tuple[tuple[int, ...], Tensor]:
    """The target's side: which layers are fused, and by what [E, layers * target width]. Raises ConfigError."""
    shape, weights = read_shape(folder, target), read_weights(folder)
    if "fc.weight" not in weights:
        raise ConfigError(f"{folder} has no tensor fc.weight")
    return shape.layers, weights["fc.weight"].float()


def check(folder: Path, target: Any) -> None:
    """See, without the target's weights, that the draft was made for such a target. Raises ConfigError."""
    weights = read_weights(folder)
    shape = read_shape(folder, target)
    read_vocabulary(weights, int(target.vocab_size), str(folder))
    expected = [shape.width, shape.target_width * len(shape.layers)]
    found = weights.get("fc.weight")
    if found is None or list(found.shape) != expected:
        told = "is missing" if found is None else f"has shape {list(found.shape)}"
        raise ConfigError(f"{folder}: fc.weight {told}; for this target it must have shape {expected}")


def save(folder: Path, module: FeatureModel, vocabulary: Tensor | None, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors into `folder`, which exists."""
    from safetensors.torch import save_file

    shape, size = module.shape, int(module.embedding.shape[0])
    config = shape.layer.to_dict() | {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": size if vocabulary is None else len(vocabulary),
        "target_hidden_size": shape.target_width,
        "norm_before_residual": shape.norm_before_residual,
        "eagle_config": {_LAYER_IDS: list(shape.layers), "use_aux_hidden_state": True},
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in module.named_parameters()}
    if vocabulary is not None:
        weights["d2t"] = vocabulary.cpu() - torch.arange(len(vocabulary))
        weights["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill(0, vocabulary.cpu(), True)
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


def is_feature_draft(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint of this layout, by its configuration."""
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return told.get("speculators_model_type") == "eagle3" or any("agle3" in n for n in told["architectures"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
