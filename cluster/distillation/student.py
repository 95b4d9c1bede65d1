"""The draft to be trained: some of the target's layers between its own embedding and head, which stay frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.errors import ConfigError

_TOLERANCE = 1e-3


class Student:
    """A causal LM of few layers, in float32, and the rows of the head that it may propose.

    module: its `state_dict` is that of an ordinary checkpoint.
    layers_from: which layers of the target it began with; None: it began with another draft's.
    vocabulary: int64 [V'], sorted target token ids, or None for all.
    """

    def __init__(self, module: Any, layers_from: Sequence[int] | None, vocabulary: Tensor | None = None) -> None:
        self.module, self.vocabulary = module, vocabulary
        self.layers_from = None if layers_from is None else tuple(layers_from)
        self._embedding = module.get_input_embeddings().weight.requires_grad_(False)
        full = module.get_output_embeddings().weight.requires_grad_(False)
        self.head: Tensor = full.detach() if vocabulary is None else full.detach()[vocabulary].clone()  # [V', E]
        self.column_of = torch.full((full.shape[0],), -1)  # [V]
        ids = torch.arange(full.shape[0]) if vocabulary is None else vocabulary
        self.column_of[ids] = torch.arange(len(ids))

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def trained_weights(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.module.get_output_embeddings().weight is self._embedding

    def hidden(self, ids: Tensor) -> Tensor:
        """ids: [B, T], padded on the right. Returns what the head reads, [B, T, E]."""
        states: Tensor = self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def state(self) -> dict[str, Tensor]:
        """The trained weights."""
        return {name: p.detach() for name, p in self.parameters.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take weights of `state`. Raises ConfigError if they are of another model."""
        mine = self.parameters
        if {n: p.shape for n, p in state.items()} != {n: p.shape for n, p in mine.items()}:
            raise ConfigError("the saved training state belongs to a draft of another shape")
        with torch.no_grad():
            for name, weight in state.items():
                mine[name].copy_(weight)


def default_layers(count: int, of: int) -> tuple[int, ...]:
    """The first count - 1 layers and the last. Raises ConfigError if there are not that many."""
    if count > of:
        raise ConfigError(f"a draft of {count} layers cannot be cut out of a target of {of}", "layers")
    return (*range(count - 1), of - 1)


def build_student(target: Any, layers_from: Sequence[int], vocabulary: Tensor | None = None) -> Student:
    """Copy `layers_from` out of `target`, a causal LM of transformers, with everything around the layers.

    Raises ConfigError when the target's layers cannot be told, or its output is not its head times its last state.
    """
    from transformers import AutoModelForCausalLM

    prefix, depth = layer_list(target)
    if bad := [n for n in layers_from if not 0 <= n < depth]:
        raise ConfigError(f"the target has {depth} layers, so there is no layer {bad[0]} to start from", "layers_from")
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers_from)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[n] for n in layers_from]
    config.dtype = torch.float32
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    source = target.state_dict()
    weights = {}
    for name in module.state_dict():
        old = name
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            old = f"{prefix}{layers_from[int(number)]}.{rest}"
        if old not in source:
            raise ConfigError(f"the target holds no {old}, so no draft can be cut out of it")
        weights[name] = source[old].detach().to("cpu", torch.float32)
    module.load_state_dict(weights)
    check_head(module)
    return Student(module, layers_from, vocabulary)


def choose_vocabulary(mass: Tensor, count: int | None, always: Sequence[int] = ()) -> Tensor | None:
    """The `count` ids of most mass in the target's answers, sorted; ties go to the lower id. None keeps all.

    mass: float [V]. always: ids that are in, whatever their mass. Zhao et al., "FR-Spec" (ACL 2025) rank by frequency
    in a corpus; here it is probability, over the answers that the draft is trained for.
    """
    if count is None or count >= len(mass):
        return None
    ranked = mass.double().clone()
    ranked[torch.tensor(list(always), dtype=torch.long)] = torch.inf
    order = torch.argsort(ranked, descending=True, stable=True)
    return order[:count].sort().values


def layer_list(target: Any) -> tuple[str, int]:
    """Name prefix of the list of layers, and their number."""
    depth = int(target.config.get_text_config().num_hidden_layers)
    for name, part in target.named_modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == depth:
            return f"{name}.", depth
    raise ConfigError(f"{type(target).__name__} keeps its layers in a way that is not known here")


@torch.no_grad()
def check_head(module: Any) -> None:
    """Raises ConfigError when a model's scores are not its head times its last state."""
    head = module.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"{type(module).__name__} has no output head that is a plain matrix; it cannot be distilled")
    ids = torch.arange(2)[None]
    plain = module.base_model(input_ids=ids, use_cache=False).last_hidden_state @ head.weight.T
    if not torch.allclose(plain, module(input_ids=ids, use_cache=False).logits, atol=_TOLERANCE, rtol=_TOLERANCE):
        raise ConfigError(
            f"{type(module).__name__} does more to its scores than multiply by its head (a scale, or a cap), "
            "which distillation does not support"
        )


def save_bytes(student: Student, dtype: torch.dtype) -> bytes:
    """The checkpoint's model.safetensors."""
    from safetensors.torch import save

    weights = dict(student.module.state_dict())
    if student.is_tied:  # once, under the embedding's name
        head = student.module.get_output_embeddings().weight
        embedding = student.module.get_input_embeddings().weight
        names = [n for n, w in weights.items() if w.data_ptr() == head.data_ptr()]
        inputs = {id(p): n for n, p in student.module.named_parameters()}
        for name in names:
            if name != inputs[id(embedding)]:
                del weights[name]
    return save({n: w.to(dtype).contiguous() for n, w in weights.items()}, metadata={"format": "pt"})


def vocabulary_bytes(vocabulary: Tensor) -> bytes:
    """The checkpoint's draft_vocab.safetensors."""
    from safetensors.torch import save

    return save({VOCABULARY: vocabulary.to(torch.int32)})


VOCABULARY = "draft_vocab"


def vocabulary_file(folder: Path) -> Path:
    """Where a checkpoint keeps the ids that it may propose."""
    return folder / f"{VOCABULARY}.safetensors"
