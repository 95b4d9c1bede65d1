"""The target's side of hidden-state drafts: what enters given layers is read in each pass, and fused where committed.

The fused vectors go to the draft with the commits (actors/features.py). Knows nothing of slots, links and drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.algorithms.draft_tree import follow
from actors.engines.protocol import Row
from actors.errors import ConfigError
from actors.features import BFLOAT16, Features
from actors.messages import VerificationResult

NEWEST = 256
"""Most positions of a prompt whose features are sent: the newest. A draft does without the others, as it does after a
move. At 4,096 numbers per position that is 2 MiB."""


class FeatureTap:
    """Reads a causal LM's hidden states in its passes. Used from the model thread.

    module: of transformers. layers: those whose inputs are fused. weight: [E, layers * target width] of the projection.
    Raises ConfigError when the model's layers cannot be told, or the projection does not fit them.
    """

    def __init__(self, module: Any, layers: Sequence[int], weight: Tensor) -> None:
        stack = _layers(module)
        width = int(module.config.get_text_config().hidden_size)
        if bad := [n for n in layers if not 0 <= n < len(stack)]:
            raise ConfigError(f"the target has {len(stack)} layers, so no hidden state enters a layer {bad[0]}")
        if weight.ndim != 2 or weight.shape[1] != len(layers) * width:
            raise ConfigError(
                f"the draft fuses hidden states by fc.weight of shape {list(weight.shape)}, but {len(layers)} of this "
                f"target's have {len(layers) * width} numbers: it was made for another target"
            )
        parameter = next(module.parameters())
        self.model = projection_name(layers, weight)
        self._weight = weight.to(parameter.device, parameter.dtype)
        self._layers = tuple(layers)
        self._states: dict[int, Tensor] = {}
        self._pending: dict[int, tuple[int, Tensor]] = {}
        self._hooks = [stack[n].register_forward_pre_hook(self._reader(n), with_kwargs=True) for n in layers]

    def forget(self, slot: int) -> None:
        """Another sequence takes the slot, or none."""
        self._pending.pop(slot, None)

    def clear(self) -> None:
        """Before a pass."""
        self._states.clear()

    @torch.inference_mode()
    def fused(self, places: Sequence[int]) -> Tensor:
        """Features of these tokens of the last pass, counted through all rows: bfloat16 [N, E]."""
        index = torch.tensor(places, device=self._weight.device)
        states = [self._states[n][0].index_select(0, index) for n in self._layers]  # [N, target width]
        self._states.clear()
        return (torch.cat(states, dim=-1) @ self._weight.T).to(torch.bfloat16)

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def attach(self, rows: Sequence[Row], results: Sequence[VerificationResult | None]) -> None:
        """Put into the results of the pass that was just run the features of all that each commits.

        Those of a prompt's earlier chunks come with the first result. A pass that was replayed from a recording, or cut
        into several, is not read: its results have none.
        """
        whole = sum(len(row.tokens) for row in rows)
        if [states.shape[1] for states in self._states.values()] != [whole] * len(set(self._layers)):
            return
        committed = [_committed(row, result)[-NEWEST:] for row, result in zip(rows, results, strict=True)]
        first = 0
        places: list[int] = []
        for row, own in zip(rows, committed, strict=True):
            places.extend(first + place for place in own)
            first += len(row.tokens)
        parts = self.fused(places).cpu().split_with_sizes([len(own) for own in committed])
        for row, result, own, part in zip(rows, results, committed, parts, strict=True):
            self._send(row, result, row.start + _count(row, result) - len(own), part)

    def _send(self, row: Row, result: VerificationResult | None, position: int, part: Tensor) -> None:
        """part: bfloat16 [N, E], from absolute `position` on."""
        earlier = self._pending.pop(row.slot, None)
        end = position + len(part)
        if earlier is not None and earlier[0] + len(earlier[1]) == position:
            part = torch.cat([earlier[1], part])[-NEWEST:]
        if result is None:
            self._pending[row.slot] = (end - len(part), part)
        else:
            result.features = Features(self.model, end - len(part), part.shape[1], to_bytes(part))

    def _reader(self, number: int) -> Any:
        def read(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[number] = args[0] if args else kwargs["hidden_states"]

        return read


def projection_name(layers: Sequence[int], weight: Tensor) -> str:
    """Names a projection by what it does: 16 hex digits."""
    found = hashlib.sha256(repr(tuple(layers)).encode())
    found.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def to_bytes(features: Tensor) -> bytes:
    """features: bfloat16 [N, E] on the CPU."""
    data: bytes = features.contiguous().view(torch.int16).numpy().astype("<i2", copy=False).tobytes()
    return data


def from_bytes(features: Features) -> Tensor | None:
    """float32 [N, E]; None for what is no whole number of rows, of another type, or not finite throughout."""
    if features.dtype != BFLOAT16 or features.width < 1 or not features.data:
        return None
    if len(features.data) % (2 * features.width):
        return None
    found = torch.frombuffer(bytearray(features.data), dtype=torch.bfloat16).view(-1, features.width).float()
    return found if bool(found.isfinite().all()) else None


def _count(row: Row, result: VerificationResult | None) -> int:
    """How many of a row's tokens are committed once the pass is over."""
    return len(row.tokens) - len(row.proposal.tokens) + (result.accepted if result is not None else 0)


def _committed(row: Row, result: VerificationResult | None) -> list[int]:
    """Which of a row's tokens these are, in order."""
    proposal, first = row.proposal, len(row.tokens) - len(row.proposal.tokens)
    if result is None or not proposal.parents:
        return list(range(_count(row, result)))
    path = follow(proposal.tokens, proposal.parents, result.tokens[: result.accepted])
    return [*range(first), *(first + node for node in path)]


def _layers(module: Any) -> Any:
    depth = int(module.config.get_text_config().num_hidden_layers)
    for part in module.modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == depth:
            return part
    raise ConfigError(f"{type(module).__name__} keeps its layers in a way that is not known here")
