"""The second stage: the draft learns from the samples, and its training is written down now and then."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from cluster.distillation.feature_student import FeatureStudent
from cluster.distillation.feature_trainer import FeatureTrainer
from cluster.distillation.files import write_whole
from cluster.distillation.job import Job
from cluster.distillation.parallel import Alone, Group
from cluster.distillation.student import Student
from cluster.distillation.trainer import Trainer

_SAVE_SECONDS = 60.0
_SMOOTHING = 0.05
_FEW_STEPS = 50
"""A draft that was trained for less is hardly better than its start."""


def make_trainer(job: Job, student: Student | FeatureStudent, group: Group | None = None) -> Trainer:
    """For a student of either kind, before its first step."""
    device = str(job.target.module.device)
    if isinstance(student, FeatureStudent):
        return FeatureTrainer(student, job.target.module, job.store, job.settings, device, group)
    return Trainer(student, job.store, job.settings, device, group)


def train(job: Job, student: Student | FeatureStudent, group: Group | None = None) -> Trainer:
    """Train until the time, or the number of steps, is over. Goes on where a run that was stopped had come to.

    group: of processes that call this together; the first one's clock and files are all of theirs.
    """
    group = group or Alone()
    trainer = make_trainer(job, student, group)
    file = job.folder / "training.pt"
    if file.exists():
        trainer.load(torch.load(file, weights_only=True))
    loss = agreed = None
    saved = job.clock()
    try:
        while not job.state.trained:
            started = job.clock()
            measures = trainer.step(_agreed(_share_done(job, trainer), group, trainer))
            job.state.training_seconds += job.clock() - started
            loss = _smooth(loss, measures.loss)
            agreed = _smooth(agreed, measures.agreement)
            done = _agreed(_share_done(job, trainer), group, trainer)
            job.state.trained = done >= 1
            job.tell(
                "training",
                done,
                min(job.training_budget, job.state.training_seconds / done) * (1 - done),
                tokens=trainer.positions,
                rate=trainer.positions / max(job.state.training_seconds, 1e-9),
                loss=loss,
                agreement=agreed,
                note=_plan(job) if trainer.step_count == 1 else "",
            )
            if group.rank == 0 and job.clock() - saved > _SAVE_SECONDS:
                _save(job, trainer, file)
                saved = job.clock()
    finally:
        if group.rank == 0:
            _save(job, trainer, file)
    return trainer


def _plan(job: Job) -> str:
    """What the time will do for, as the first step has it."""
    seconds = job.state.training_seconds
    steps = max(1, int(job.training_budget / max(seconds, 1e-9)))
    if job.settings.max_steps is not None:
        steps = min(steps, job.settings.max_steps)
    answers = steps * job.settings.batch
    if steps < _FEW_STEPS:
        return (
            f"a step takes {seconds:.1f} s here, so there is time for about {steps}, which is too few to learn much: "
            "give more minutes, or train on a GPU"
        )
    return f"a step takes {seconds:.1f} s here, so there is time for about {steps:,} ({answers:,} answers)"


def _share_done(job: Job, trainer: Trainer) -> float:
    share = job.state.training_seconds / job.training_budget
    if job.settings.max_steps is not None:
        share = max(share, trainer.step_count / job.settings.max_steps)
    return min(share, 1.0)


def _agreed(share: float, group: Group, trainer: Trainer) -> float:
    """What the first process says."""
    if group.size == 1:
        return share
    told = torch.tensor([share if group.rank == 0 else 0.0], device=trainer.device)
    return float(group.total([told])[0])


def _save(job: Job, trainer: Trainer, file: Path) -> None:
    buffer = io.BytesIO()
    torch.save(trainer.state(), buffer)
    write_whole(file, buffer.getvalue())
    job.save()


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else before + _SMOOTHING * (value - before)
