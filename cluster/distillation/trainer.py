"""Training the draft on stored samples. Its state is small and whole, so that it can stop and go on at any step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cluster.distillation.loss import Goal, Measures, distillation_loss
from cluster.distillation.parallel import Alone, Group
from cluster.distillation.settings import DistillSettings
from cluster.distillation.store import Sample, SampleStore, read_shard
from cluster.distillation.student import Student

_CLIP = 1.0
_RISE = 0.1
"""Of the training: the longest that the learning rate rises."""


class Trainer:
    """One optimiser step at a time.

    Matrices are trained with Muon (Jordan et al. 2024: momentum, orthogonalised, scaled to AdamW's step size), the
    other parameters with AdamW.
    """

    def __init__(
        self,
        student: Student,
        store: SampleStore,
        settings: DistillSettings,
        device: str = "cpu",
        group: Group | None = None,
    ) -> None:
        self.student, self._store, self._settings, self.device = student, store, settings, device
        self._group = group or Alone()
        student.module.to(device).train()
        self._low = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self._head = student.head.to(device, self._low)
        self._column_of = student.column_of.to(device)
        self._parameters = list(student.parameters.values())
        self._optimisers = _optimisers(self._parameters, settings)
        self.step_count = 0
        self.positions = 0
        """Answer tokens trained on so far, repetitions included."""
        self._epoch, self._offset = 0, 0
        self._batches: Iterator[list[Sample]] | None = None

    def step(self, progress: float) -> Measures:
        """Train on the next batch. progress: how much of the training is over, from 0 to 1; it sets the rate."""
        batch = self._next()[self._group.rank :: self._group.size]
        rate = self._settings.learning_rate * self.rate(progress)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        measures = self._differentiate(batch)
        torch.nn.utils.clip_grad_norm_(self._parameters, _CLIP)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step_count += 1
        self.positions += measures.positions
        return measures

    def _differentiate(self, batch: Sequence[Sample]) -> Measures:
        """Gradients of the mean loss over the whole group's positions. batch: this process's share, maybe empty."""
        measures = Measures()
        if batch:
            loss, measures = self._loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        if self._group.size == 1:
            return measures
        own = measures.positions
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad * own for p in self._parameters]
        sums = torch.tensor(measures.as_list(), device=self.device)
        *gradients, sums = self._group.total([*gradients, sums])
        measures = Measures.of(sums.tolist())
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient / measures.positions
        return measures

    def _loss(self, batch: Sequence[Sample]) -> tuple[Tensor, Measures]:
        ids, places = lay_out(batch)
        with self._autocast():
            hidden = self.student.hidden(ids.to(self.device))[places.to(self.device)]
        return distillation_loss(hidden.float(), self._head, self._goal(batch), self._weight)

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> Measures:
        """The draft as it is now, along samples that it was not trained on."""
        total = Measures()
        for start in range(0, len(samples), self._settings.batch):
            batch = samples[start : start + self._settings.batch]
            ids, places = lay_out(batch)
            with self._autocast():
                hidden = self.student.hidden(ids.to(self.device))[places.to(self.device)]
            total.add(distillation_loss(hidden, self._head, self._goal(batch), 0.0)[1])
        return total

    def rate(self, progress: float) -> float:
        """The learning rate as a share of its peak: a linear rise over `warmup` steps, flat, then linear to zero."""
        rise = min(1.0, max((self.step_count + 1) / self._settings.warmup, progress / _RISE))
        fall = min(1.0, max(0.0, 1.0 - progress) / self._settings.decay)
        return rise * fall

    def state(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {
            "weights": self.student.state(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "place": {
                "step": self.step_count,
                "positions": self.positions,
                "epoch": self._epoch,
                "offset": self._offset,
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. Raises ConfigError if it is of another model."""
        self.student.load(state["weights"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        place = state["place"]
        self.step_count, self.positions = place["step"], place["positions"]
        self._epoch, self._offset = place["epoch"], place["offset"]
        self._batches = None

    @property
    def _weight(self) -> float:
        return self._settings.acceptance_weight

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._low == torch.float32:
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, self._low)

    def _goal(self, batch: Sequence[Sample]) -> Goal:
        ids = torch.cat([s.top_ids for s in batch]).to(self.device)
        return Goal.of(ids, torch.cat([s.top_logp for s in batch]).to(self.device), self._column_of)

    def _next(self) -> list[Sample]:
        if self._batches is None:
            self._batches = self._epoch_batches(self._epoch)
            for _ in range(self._offset):
                next(self._batches, None)
        batch = next(self._batches, None)
        if batch is None:
            self._epoch, self._offset, self._batches = self._epoch + 1, 0, None
            return self._next()
        self._offset += 1
        return batch

    def _epoch_batches(self, epoch: int) -> Iterator[list[Sample]]:
        """All samples once. Only a window of shards is in memory; answers of like length go together."""
        settings = self._settings
        order = random.Random(f"{settings.seed}/{epoch}")
        shards = self._store.shards
        order.shuffle(shards)
        waiting = deque(shards)
        while waiting:
            window = [read_shard(waiting.popleft()) for _ in range(min(settings.window, len(waiting)))]
            samples = [sample for shard in window for sample in shard]
            order.shuffle(samples)
            samples.sort(key=lambda s: len(s) // 16)  # stable: random within a length
            batches = [samples[i : i + settings.batch] for i in range(0, len(samples), settings.batch)]
            order.shuffle(batches)
            yield from batches


def lay_out(batch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Ids [B, T], padded on the right with the first id, and bool [B, T]: where an answer token is to be predicted.

    Taking the True places in row order gives the answers' tokens end to end.
    """
    longest = max(map(len, batch)) - 1
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    places = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, sample in enumerate(batch):
        tokens = torch.cat([sample.prompt, sample.answer])[:-1]
        ids[row, : len(tokens)] = tokens
        places[row, len(sample.prompt) - 1 : len(tokens)] = True
    return ids, places


def _optimisers(parameters: Sequence[torch.nn.Parameter], settings: DistillSettings) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(
            torch.optim.Muon(
                matrices,
                lr=settings.learning_rate,
                momentum=0.95,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if others:
        found.append(torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
    return found
