"""Training a hidden-state draft: the draft's own features are fed back for some steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.distillation.feature_student import FeatureStudent, HiddenStates, unrolled
from cluster.distillation.loss import Measures, distillation_loss
from cluster.distillation.parallel import Group
from cluster.distillation.settings import DistillSettings
from cluster.distillation.store import Sample, SampleStore
from cluster.distillation.trainer import Trainer, lay_out


class FeatureTrainer(Trainer):
    """A Trainer whose loss is the weighted mean of that at each depth.

    Depth 1 reads the target's features, depth n own ones made in the n - 1 steps before it. Some texts lack the
    target's features up to a random place (settings.missing), as a draft does that was moved or told too late.
    """

    def __init__(
        self,
        student: FeatureStudent,
        target: Any,
        store: SampleStore,
        settings: DistillSettings,
        device: str = "cpu",
        group: Group | None = None,
    ) -> None:
        super().__init__(student, store, settings, device, group)  # type: ignore[arg-type]  # its `hidden` is not asked
        self._features = student
        self._reader = HiddenStates(target, student.module.shape.layers, self._low)
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._room = settings.kept_gib * 2**30
        self._weights = [settings.depth_weight**n for n in range(settings.unrolled)]
        self.depths: list[Measures] = []
        """Of the last batch, by depth."""

    def _loss(self, batch: Sequence[Sample]) -> tuple[Tensor, Measures]:
        order = random.Random(f"{self._settings.seed}/missing/{self.step_count}")
        known = torch.zeros(len(batch), 1, 1)
        for row, sample in enumerate(batch):
            if order.random() < self._settings.missing:
                known[row] = order.randrange(len(sample))
        self.depths = []
        loss = torch.zeros((), device=self.device)
        for weight, (part, measures) in zip(self._weights, self._unrolled(batch, known), strict=True):
            loss = loss + weight / sum(self._weights) * part
            self.depths.append(measures)
        return loss, self.depths[0]

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> Measures:
        """At depth 1; see `by_depth`."""
        return self.by_depth(samples)[0]

    @torch.no_grad()
    def by_depth(self, samples: Sequence[Sample]) -> list[Measures]:
        """The draft as it is now, along samples that it was not trained on, at each depth given a true prefix."""
        totals = [Measures() for _ in self._weights]
        for start in range(0, len(samples), self._settings.batch):
            batch = samples[start : start + self._settings.batch]
            parts = self._unrolled(batch, torch.zeros(len(batch), 1, 1))
            for total, (_, measures) in zip(totals, parts, strict=True):
                total.add(measures)
        return totals

    def _unrolled(self, batch: Sequence[Sample], known_from: Tensor) -> list[tuple[Tensor, Measures]]:
        """Loss and measures at each depth. known_from: [B, 1, 1], where the target's features begin."""
        ids, places = (part.to(self.device) for part in lay_out(batch))
        goal, found = self._goal(batch), []
        states = self._states(batch, ids)
        with self._autocast():
            features = self._features.module.fuse([states])
            at = torch.arange(ids.shape[1], device=self.device)[None, :, None]
            features = features * (at >= known_from.to(self.device))
            for hidden in unrolled(self._features.module, ids, features, len(self._weights)):
                found.append(distillation_loss(hidden[places].float(), self._head, goal, self._weight))
        return found

    def _states(self, batch: Sequence[Sample], ids: Tensor) -> Tensor:
        """Hidden states of the target, end to end: [B, T, layers * target_width]. As many as fit are kept."""
        names = [(*sample.prompt.tolist(), *sample.answer.tolist()) for sample in batch]
        if not all(name in self._kept for name in names):
            states = torch.cat(self._reader.read(ids), dim=-1).to(torch.bfloat16)
            for row, (name, sample) in enumerate(zip(names, batch, strict=True)):
                own = states[row, : len(sample) - 1].clone()
                if name not in self._kept and own.nbytes <= self._room:
                    self._kept[name] = own
                    self._room -= own.nbytes
            return states.float()
        kept = [self._kept[name] for name in names]
        return torch.nn.utils.rnn.pad_sequence(kept, batch_first=True).float()
