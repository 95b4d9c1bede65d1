"""A distillation run from beginning to end, resumable at any moment.

    sampling -> training -> evaluation -> export

Whatever is done is kept in `OUT.partial` until OUT is there; giving the same command again goes on from it. OUT
appears whole, or not at all.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from actors.errors import ConfigError
from cluster.distillation import export, sampling
from cluster.distillation.appraisal import appraise
from cluster.distillation.feature_student import FeatureStudent, build_feature_student
from cluster.distillation.files import explained
from cluster.distillation.job import Job, Report, Target, locked, look_at_state, open_state
from cluster.distillation.parallel import Group
from cluster.distillation.prompts import Ids, digest, split, without
from cluster.distillation.sampler import Source
from cluster.distillation.settings import DistillSettings
from cluster.distillation.start import Start, continue_student
from cluster.distillation.store import Sample
from cluster.distillation.student import Student, build_student, default_layers
from cluster.distillation.training import train

_LOOK_S = 1.0


def distill(
    target: Target,
    prompts: Sequence[Ids],
    out: Path,
    settings: DistillSettings,
    *,
    report: Report = lambda progress: None,
    traffic: Iterable[Sample] | None = None,
    start: Start | None = None,
    held: Sequence[Ids] | None = None,
    source: Source | None = None,
    group: Group | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Make a draft for `target` and write it to `out` as a checkpoint. Returns its card (also in out/card.json).

    prompts: as token ids. held: those to evaluate on, which are not trained on; None keeps some of `prompts` from
    training. traffic: answers recorded elsewhere, trained on as well. start: a draft to begin from, as settings.start
    names it. source: who answers the prompts; None is `target` itself, here. group: processes that train together;
    this is the first of them, and the others call `assist`.

    Raises ConfigError when the target cannot be distilled, `start` does not fit it, `out` is taken, a run with other
    settings is unfinished there, or the disk is full; PromptError for too few prompts. After any error, and after
    KeyboardInterrupt, the same call goes on where this one stopped.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; choose another place, or move it away")
    kept_back = split(prompts, settings.held)[1] if held is None else list(held)
    asked = without(prompts, kept_back)
    student = _student_maker(target, settings, start)
    student(None)  # whether it can be done at all, before any work
    work = out.with_name(f"{out.name}.partial")
    with explained(work), locked(work):
        identity = {
            "format": 1,
            "target": target.reference,
            "prompts": digest(prompts),
            "held prompts": None if held is None else digest(held),
            "weights of the start": None if start is None else start.digest(),
            "traffic": traffic is not None,
            "settings": settings.model_dump(mode="json"),
        }
        job = Job(target, settings, work, open_state(work, identity), report, clock)
        if traffic is not None:
            sampling.take_in(job, traffic, kept_back)
        sampling.sample(job, asked, source)
        draft = student(sampling.vocabulary(job, None if start is None else start.vocabulary))
        trainer = train(job, draft, group)
        card = appraise(job, draft, trainer, kept_back, out.name)
        job.tell("export", 0.0)
        export.write(out, draft, target, card)
        shutil.rmtree(work, ignore_errors=True)
        job.tell("export", 1.0)
    return card


def assist(
    target: Target,
    out: Path,
    settings: DistillSettings,
    group: Group,
    *,
    start: Start | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Train together with a process that calls `distill`: waits until there are samples, and ends with the training.

    Both must see the same folder. What is wrong with the command is said by the first process, which ends them all.
    """
    student = _student_maker(target, settings, start)
    folder = out.with_name(f"{out.name}.partial")
    while not (state := look_at_state(folder)) or not state.sampled:
        sleep(_LOOK_S)
    job = Job(target, settings, folder, state, lambda progress: None)
    train(job, student(sampling.vocabulary(job, None if start is None else start.vocabulary)), group)


def _student_maker(
    target: Target, settings: DistillSettings, start: Start | None
) -> Callable[[Tensor | None], Student | FeatureStudent]:
    """Makes the untrained draft of a vocabulary. Raises ConfigError."""
    if (start is None) != (settings.start is None):
        raise ConfigError("settings.start and the draft to begin from go together", "start")
    if start is not None:
        if start.layers != settings.layers:
            raise ConfigError(f"{start.reference} has {start.layers} layers, not {settings.layers}", "layers")
        return lambda vocabulary: continue_student(target.module, start, vocabulary)
    if settings.kind == "hidden_states":
        return lambda vocabulary: build_feature_student(
            target.module, settings.feature_layers, vocabulary, settings.seed
        )
    depth = int(target.module.config.get_text_config().num_hidden_layers)
    layers = settings.layers_from or default_layers(settings.layers, depth)
    return lambda vocabulary: build_student(target.module, layers, vocabulary)
