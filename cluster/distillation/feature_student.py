"""The hidden-state draft to be trained: its start, its passes over whole texts, and what it feeds itself.

Training-time test (Li et al., "EAGLE-3", 2025, section 3.2): after a pass on the target's features come passes in which
each position reads the draft's own output at the position before, and attends, for the last positions, to keys made
from such outputs. So it learns on what it will read when it runs ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actors.engines.transformers.feature_layer import FeatureModel, FeatureShape, default_feature_layers
from actors.errors import ConfigError
from cluster.distillation.student import check_head, layer_list

_COPIED = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "hidden_act")


class HiddenStates:
    """Reads what enters given layers of a target, in passes over whole texts. Used as a context.

    A target that ran in slots is given an attention of its own again.
    dtype: of the arithmetic of the target's pass.
    """

    def __init__(self, target: Any, layers: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        self._base, self._dtype = target.base_model, dtype
        prefix, depth = layer_list(target)
        if bad := [n for n in layers if not 0 <= n < depth]:
            raise ConfigError(f"the target has {depth} layers, so no hidden state enters a layer {bad[0]}")
        target.set_attn_implementation("sdpa")
        stack = target.get_submodule(prefix.removesuffix("."))
        self._states: dict[int, Tensor] = {}
        self._hooks = [stack[n].register_forward_pre_hook(self._reader(n), with_kwargs=True) for n in layers]
        self._layers = tuple(layers)

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def read(self, ids: Tensor) -> list[Tensor]:
        """ids: [B, T]. Returns one [B, T, target_width] per layer."""
        device = ids.device.type
        with torch.autocast(device, self._dtype, enabled=self._dtype != torch.float32):
            self._base(input_ids=ids, use_cache=False)
        states, self._states = self._states, {}
        return [states[n].float() for n in self._layers]

    def _reader(self, number: int) -> Any:
        def read(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[number] = args[0] if args else kwargs["hidden_states"]

        return read


class FeatureStudent:
    """A FeatureModel in training. It offers what trainer.Trainer asks of a student.

    vocabulary: int64 [V'], sorted target token ids that it may propose, or None for all.
    """

    def __init__(self, module: FeatureModel, vocabulary: Tensor | None = None) -> None:
        self.module, self.vocabulary = module, vocabulary
        self.layers_from = None
        size = module.embedding.shape[0]
        self.head: Tensor = module.head
        self.column_of = torch.full((size,), -1)  # [V]
        ids = torch.arange(size) if vocabulary is None else vocabulary
        self.column_of[ids] = torch.arange(len(ids))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are trained."""
        return dict(self.module.named_parameters())

    @property
    def is_tied(self) -> bool:
        """Embedding and head are the target's, and no part of the checkpoint."""
        return True

    @property
    def trained_weights(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.parameters.values())

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


def unrolled(module: FeatureModel, ids: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
    """What the head reads, [B, T, E], from the target's features, then from own ones, `steps` times in all.

    ids: [B, T]. features: [B, T, E] of the positions themselves (the shift to the position before is done here).
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    attention = UnrolledAttention()
    for _ in range(steps):
        features = module(ids, positions, delayed(features), attention)
        hidden: Tensor = module.norm(features)
        yield hidden


def delayed(features: Tensor) -> Tensor:
    """[B, T, E] moved to the next position; the first one has no feature."""
    return nn.functional.pad(features, (0, 0, 1, -1))


class UnrolledAttention:
    """Attention of successive passes over one text, each a step further from the target's features than the last.

    In pass n, position t attends to positions up to t - n as the first pass made them, and to position t - j as pass
    n - j did (0 <= j < n): what a draft sees that was last told true features n positions ago.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See feature_layer.Attend."""
        fold = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(fold, 1))
        self._values.append(value.repeat_interleave(fold, 1))
        n, length = len(self._keys) - 1, query.shape[2]
        if n == 0:
            mixed = nn.functional.scaled_dot_product_attention(query, self._keys[0], self._values[0], is_causal=True)
            return mixed.transpose(1, 2)
        scale = query.shape[-1] ** -0.5
        ahead = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1 - n)
        scores = (query @ self._keys[0].transpose(-1, -2)) * scale  # [B, H, T, T]
        parts = [scores.masked_fill(ahead, -torch.inf)]
        for step in range(1, n + 1):
            back = n - step
            own = (query * _moved(self._keys[step], back)).sum(-1, keepdim=True) * scale  # [B, H, T, 1]
            none = torch.arange(length, device=query.device)[:, None] < back
            parts.append(own.masked_fill(none, -torch.inf))
        weights = torch.cat(parts, dim=-1).softmax(-1)
        mixed = weights[..., :length] @ self._values[0]
        for step in range(1, n + 1):
            mixed = mixed + weights[..., length + step - 1, None] * _moved(self._values[step], n - step)
        return mixed.transpose(1, 2)


def _moved(x: Tensor, back: int) -> Tensor:
    """[B, H, T, D], where position t holds what was at t - back."""
    return nn.functional.pad(x, (0, 0, back, -back)) if back else x


def build_feature_student(
    target: Any, layers: Sequence[int] | None = None, vocabulary: Tensor | None = None, seed: int = 0
) -> FeatureStudent:
    """An untrained draft for `target`, a causal LM of transformers.

    It begins as near to the target as can be: the target's last layer on the latest feature, with small random weights
    where that layer has none (Li et al. begin from nothing). Raises ConfigError when the target has no plain head.
    """
    target.set_attn_implementation("sdpa")  # it may have run in slots
    check_head(target)
    text = target.config.get_text_config()
    prefix, depth = layer_list(target)
    chosen = tuple(layers) if layers is not None else default_feature_layers(depth)
    width = int(text.hidden_size)
    shape = FeatureShape(layer_config(text), width, chosen)
    embedding = target.get_input_embeddings().weight.detach().to("cpu", torch.float32)
    head = target.get_output_embeddings().weight.detach().to("cpu", torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = FeatureModel(shape, embedding, head if vocabulary is None else head[vocabulary].clone())
        for parameter in module.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
    _begin(module, target, f"{prefix}{depth - 1}.", width)
    return FeatureStudent(module, vocabulary)


@torch.no_grad()
def _begin(module: FeatureModel, target: Any, last: str, width: int) -> None:
    source = {name: w.detach().to("cpu", torch.float32) for name, w in target.state_dict().items()}
    mine = dict(module.midlayer.named_parameters())
    for name, parameter in mine.items():
        weight = source.get(last + name.replace("hidden_norm", "input_layernorm"))
        if weight is None:
            continue
        if weight.shape == parameter.shape:
            parameter.copy_(weight)
        elif parameter.ndim == 2 and weight.shape == (parameter.shape[0], width):
            parameter[:, width:] = weight  # the half that reads the feature
    module.fc.weight[:, -width:] += torch.eye(width)
    final = source.get(f"{last.rsplit('.', 3)[0]}.norm.weight")
    if final is not None and final.shape == module.norm.weight.shape:
        module.norm.weight.copy_(final)


def layer_config(text: Any) -> Any:
    """A LlamaConfig of one layer with the sizes and the rotary settings of a target's text model."""
    from transformers import LlamaConfig

    values = {name: getattr(text, name) for name in _COPIED if getattr(text, name, None) is not None}
    if "head_dim" not in values:
        values["head_dim"] = text.hidden_size // text.num_attention_heads
    for name in ("rope_parameters", "rope_theta", "rope_scaling"):
        if getattr(text, name, None) is not None:
            values[name] = getattr(text, name)
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position_embeddings=text.max_position_embeddings,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        **values,
    )
