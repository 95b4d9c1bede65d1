"""Training by several processes, one per GPU: each takes its share of every batch, and gradients are summed.

Every process has the whole draft, which is small, and takes the same steps; so their weights stay the same, and are
those that one process would have trained on the whole batches, up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """The processes that train together. The first one has rank 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all processes; each gives as many tensors of the same shapes."""
        ...


class Alone:
    """One process."""

    rank, size = 0, 1

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See Group."""
        return list(tensors)


class Accelerated:
    """The processes of `accelerate launch` (or torchrun): NCCL between GPUs, gloo between CPUs."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.size: int = accelerator.num_processes
        self.device = str(accelerator.device)

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See Group; as one message."""
        flat = torch.cat([tensor.flatten().float() for tensor in tensors])
        summed = self._accelerator.reduce(flat, reduction="sum")
        parts = summed.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def close(self) -> None:
        """Leave the group."""
        self._accelerator.end_training()


def launched() -> Accelerated | None:
    """The group that this process was started in, or None if it was started alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from accelerate import Accelerator

    return Accelerated(Accelerator(cpu=not torch.cuda.is_available()))
