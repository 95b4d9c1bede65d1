"""The third stage: what the trained draft is worth on prompts that it was not trained on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from actors.engines.transformers.causal_lm import CausalLM
from actors.settings import Rule
from cluster.distillation import export
from cluster.distillation.evaluation import Acceptance, acceptance, agreement
from cluster.distillation.feature_appraisal import appraise_features
from cluster.distillation.feature_student import FeatureStudent
from cluster.distillation.job import Job
from cluster.distillation.prompts import Ids
from cluster.distillation.student import Student
from cluster.distillation.trainer import Trainer

RULES: tuple[tuple[Rule, float], ...] = (
    ("coupled", 0.0),
    ("coupled", 0.8),
    ("rejection", 0.8),
    ("block", 0.8),
    ("typical", 0.8),
    ("coupled", 1.0),
    ("rejection", 1.0),
    ("block", 1.0),
    ("typical", 1.0),
)
"""What is measured: at temperature 0 the exact rules are one."""


def appraise(
    job: Job, student: Student | FeatureStudent, trainer: Trainer, held: Sequence[Ids], name: str
) -> dict[str, Any]:
    """The draft's card. Greedy agreement on all `held` prompts, acceptance on the first few of them."""
    if isinstance(student, FeatureStudent):
        return appraise_features(job, student, trainer, held, name)
    return _appraise_layers(job, student, trainer, held, name)


def _appraise_layers(job: Job, student: Student, trainer: Trainer, held: Sequence[Ids], name: str) -> dict[str, Any]:
    settings, module = job.settings, job.target.module
    started = job.clock()

    def tell(done: float) -> None:
        job.tell("evaluation", done, (job.clock() - started) * (1 / done - 1) if done else 0.0)

    tell(0.0)
    target = CausalLM(module, name=job.target.reference, eos=job.target.eos)
    trained = copy.deepcopy(student.module).to(module.device, module.dtype)
    draft = CausalLM(trained, name=name, eos=job.target.eos, vocabulary=student.vocabulary)
    agreed = agreement(target, draft, held, settings.evaluation_tokens)
    rows: list[Acceptance] = []
    for rule, temperature in RULES:
        tell((len(rows) + 1) / (len(RULES) + 1))
        rows.append(
            acceptance(
                target,
                draft,
                held[: settings.evaluation_prompts],
                rule=rule,
                temperature=temperature,
                tokens=settings.evaluation_tokens,
                lookahead=settings.lookahead,
                seed=settings.seed,
            )
        )
    tell(1.0)
    return export.card(
        target=job.target,
        student=student,
        settings=settings,
        sampled_tokens=job.store.tokens,
        steps=trainer.step_count,
        positions=trainer.positions,
        seconds=(job.state.sampling_seconds, job.state.training_seconds),
        agreement=agreed,
        acceptance=rows,
        held=len(held),
    )
