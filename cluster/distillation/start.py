"""A finished draft to begin from: the next draft need not begin from the target's own layers."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.errors import ConfigError
from cluster.distillation.student import Student, check_head


@dataclass(frozen=True, slots=True)
class Start:
    """module: the draft, a causal LM of transformers. reference: what the user calls it.

    vocabulary: int64 [V'], sorted ids that it may propose, or None for all.
    """

    module: Any
    reference: str
    vocabulary: Tensor | None = None

    @property
    def layers(self) -> int:
        """How many it has."""
        return int(self.module.config.get_text_config().num_hidden_layers)

    def digest(self) -> str:
        """Names its weights, so that a run goes on from the same ones."""
        found = hashlib.sha256()
        for name, weight in sorted(self.module.state_dict().items()):
            found.update(name.encode())
            found.update(weight.detach().float().contiguous().cpu().numpy().tobytes())
        return found.hexdigest()


def continue_student(target: Any, start: Start, vocabulary: Tensor | None = None) -> Student:
    """A draft to train further: the layers of `start` between the embedding and the head of `target`.

    Raises ConfigError, with the name of the weight, if embedding or head of the two differ in shape.
    """
    from transformers import AutoModelForCausalLM

    own = _around(target)
    for name, weight in _around(start.module).items():
        if weight.shape != own[name].shape:
            raise ConfigError(
                f"{start.reference} is no draft for this target: its {name} has shape {list(weight.shape)}, "
                f"the target's {list(own[name].shape)}",
                "start",
            )
    config = copy.deepcopy(start.module.config)
    config.tie_word_embeddings = own["output head"] is own["embedding"]
    config.dtype = torch.float32
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    module.load_state_dict({name: w.detach().to("cpu", torch.float32) for name, w in _weights(start, module).items()})
    with torch.no_grad():
        for name, weight in _around(module).items():
            weight.copy_(own[name].detach().to("cpu", torch.float32))
    check_head(module)
    return Student(module, None, vocabulary)


def _around(module: Any) -> dict[str, Tensor]:
    head = module.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(module).__name__} has no output head; it cannot be distilled")
    return {"embedding": module.get_input_embeddings().weight, "output head": head.weight}


def _weights(start: Start, module: Any) -> dict[str, Tensor]:
    """Of `start`, under the names of `module`."""
    known: dict[str, Tensor] = start.module.state_dict()
    if missing := [name for name in module.state_dict() if name not in known]:
        raise ConfigError(f"{start.reference} holds no {missing[0]}, so no draft can begin from it", "start")
    return {name: known[name] for name in module.state_dict()}
