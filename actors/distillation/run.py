"""A distillation run from beginning to end, resumable at any moment.

    sampling -> training -> evaluation -> export

Whatever is done is kept in `OUT.partial` until OUT is there; giving the same command again goes on from it. OUT
appears whole, or not at all.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actors.distillation import export
from actors.distillation.evaluation import Acceptance, acceptance, agreement
from actors.distillation.files import explained, write_whole
from actors.distillation.prompts import Ids, digest, split
from actors.distillation.sampler import Sampler
from actors.distillation.settings import DistillSettings
from actors.distillation.store import Sample, SampleStore
from actors.distillation.student import Student, build_student, choose_vocabulary, default_layers
from actors.distillation.trainer import Trainer
from actors.engines.causal_lm import CausalLM
from actors.errors import ConfigError
from actors.settings import Rule

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

_SAVE_SECONDS = 60.0
_SMOOTHING = 0.05
_NEVER = -1e4
"""Log-probability of a place that holds no token; float16 has it."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model to make a draft for, and what its draft must carry along.

    module: a causal LM of transformers. reference: what the user calls it. save_tokenizer: writes the tokenizer's
    files into a folder. fingerprint: of the vocabulary.
    """

    module: Any
    reference: str
    eos: tuple[int, ...]
    save_tokenizer: Callable[[Path], object]
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. done: of its stage, 0 to 1. seconds_left: of sampling and training, as planned."""

    stage: Literal["sampling", "training", "evaluation", "export"]
    done: float
    seconds_left: float
    tokens: int = 0
    loss: float | None = None
    agreement: float | None = None


@dataclass(slots=True)
class _State:
    """What is kept in state.json next to the samples and the training state."""

    identity: dict[str, Any]
    sampling_seconds: float = 0.0
    training_seconds: float = 0.0
    imported: bool = False
    sampled: bool = False
    trained: bool = False

    def write(self, path: Path) -> None:
        values = {name: getattr(self, name) for name in self.__slots__}
        write_whole(path, json.dumps(values, indent=1).encode())


def distill(
    target: Target,
    prompts: Sequence[Ids],
    out: Path,
    settings: DistillSettings,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    traffic: Iterable[Sample] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Make a draft for `target` and write it to `out` as a checkpoint. Returns its card (also in out/card.json).

    prompts: as token ids; some are kept from training. traffic: answers recorded elsewhere, trained on as well.
    Raises ConfigError when the target cannot be distilled, `out` is taken, a run with other settings is unfinished
    there, or the disk is full; PromptError for too few prompts. After any error, and after KeyboardInterrupt, the
    same call goes on where this one stopped.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; choose another place, or move it away")
    work = out.with_name(f"{out.name}.partial")
    with explained(work), _locked(work):
        return _Run(target, prompts, out, work, settings, report, clock, traffic is not None).go(traffic)


class _Run:
    def __init__(
        self,
        target: Target,
        prompts: Sequence[Ids],
        out: Path,
        work: Path,
        settings: DistillSettings,
        report: Callable[[Progress], None],
        clock: Callable[[], float],
        with_traffic: bool,
    ) -> None:
        self._target, self._out, self._work, self._settings = target, out, work, settings
        self._report, self._clock = report, clock
        self._training_prompts, self._held = split(prompts, settings.held)
        depth = int(target.module.config.get_text_config().num_hidden_layers)
        self._layers_from = settings.layers_from or default_layers(settings.layers, depth)
        build_student(target.module, self._layers_from[:1])  # whether it can be done at all, before any work
        self._state = self._read_state(
            {
                "format": 1,
                "target": target.reference,
                "prompts": digest(prompts),
                "traffic": with_traffic,
                "settings": settings.model_dump(mode="json"),
            }
        )
        self._store = SampleStore(work / "samples")
        self._budget = settings.minutes * 60

    def go(self, traffic: Iterable[Sample] | None) -> dict[str, Any]:
        if not self._state.sampled:
            if traffic is not None and not self._state.imported:
                self._import(traffic)
            self._sample()
        student = build_student(self._target.module, self._layers_from, self._vocabulary())
        trainer = Trainer(student, self._store, self._settings, str(self._target.module.device))
        self._train(trainer)
        card = self._evaluate(student, trainer)
        self._tell("export", 0.0)
        export.write(self._out, student, self._target, card)
        shutil.rmtree(self._work, ignore_errors=True)
        self._tell("export", 1.0)
        return card

    def _import(self, traffic: Iterable[Sample]) -> None:
        for shard in self._store.shards:  # of an import that did not end
            shard.unlink()
        samples = iter(traffic)
        while chunk := list(islice(samples, self._settings.shard)):
            self._store.append([self._fitted(sample) for sample in chunk])
        self._state.imported = True
        self._save_state()

    def _fitted(self, sample: Sample) -> Sample:
        """With as many log-probabilities per position as all others. Raises ConfigError for ids of another model."""
        size, top = int(self._target.module.get_input_embeddings().num_embeddings), self._settings.top
        if max(int(t.max()) for t in (sample.prompt, sample.answer, sample.top_ids)) >= size:
            raise ConfigError(f"the recorded traffic holds ids outside the target's vocabulary of {size}")
        missing = max(0, top - sample.top_ids.shape[1])
        ids = torch.nn.functional.pad(sample.top_ids[:, :top], (0, missing))
        logp = torch.nn.functional.pad(sample.top_logp[:, :top], (0, missing), value=_NEVER)
        return dataclasses.replace(sample, top_ids=ids, top_logp=logp)

    def _sample(self) -> None:
        settings = self._settings
        budget = self._budget * settings.sampling_share
        sampler = Sampler(
            self._low_precision_target(),
            slots=settings.slots,
            context=settings.context,
            answer=settings.answer,
            top=settings.top,
        )
        number = len(self._store.shards)
        while not self._state.sampled:
            started = self._clock()
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
            self._store.append(sampler.sample(self._prompts_of_shard(number), generator))
            number += 1
            self._state.sampling_seconds += self._clock() - started
            tokens = self._store.tokens
            done = self._state.sampling_seconds / budget
            if settings.max_tokens is not None:
                done = max(done, tokens / settings.max_tokens)
            self._state.sampled = done >= 1
            self._save_state()
            left = budget * (1 - done) + self._budget - budget
            self._tell("sampling", done, left, tokens=tokens)

    def _prompts_of_shard(self, number: int) -> list[tuple[Ids, float]]:
        """Every prompt has its turn before any has its second."""
        settings, prompts = self._settings, self._training_prompts
        chosen = []
        for place in range(number * settings.shard, (number + 1) * settings.shard):
            turn, index = divmod(place, len(prompts))
            order = list(range(len(prompts)))
            random.Random(f"{settings.seed}/prompts/{turn}").shuffle(order)
            draw = random.Random(f"{settings.seed}/temperature/{place}")
            chosen.append((prompts[order[index]], draw.choice(settings.temperatures)))
        return chosen

    def _vocabulary(self) -> Tensor | None:
        size = int(self._target.module.get_output_embeddings().weight.shape[0])
        if self._settings.vocabulary is None or self._settings.vocabulary >= size:
            return None
        mass = torch.zeros(size, dtype=torch.float64)
        for sample in self._store.samples():
            mass.scatter_add_(0, sample.top_ids.long().flatten(), sample.top_logp.double().exp().flatten())
        return choose_vocabulary(mass, self._settings.vocabulary, self._target.eos)

    def _train(self, trainer: Trainer) -> None:
        file = self._work / "training.pt"
        if file.exists():
            trainer.load(torch.load(file, weights_only=True))
        budget = self._budget * (1 - self._settings.sampling_share)
        loss = agreed = None
        saved = self._clock()
        try:
            while not self._state.trained:
                started = self._clock()
                measures = trainer.step(self._trained_share(trainer, budget))
                self._state.training_seconds += self._clock() - started
                loss = _smooth(loss, measures.loss)
                agreed = _smooth(agreed, measures.agreement)
                done = self._trained_share(trainer, budget)
                self._state.trained = done >= 1
                self._tell("training", done, budget * (1 - done), trainer.positions, loss, agreed)
                if self._clock() - saved > _SAVE_SECONDS:
                    self._save_training(trainer, file)
                    saved = self._clock()
        finally:
            self._save_training(trainer, file)

    def _trained_share(self, trainer: Trainer, budget: float) -> float:
        share = self._state.training_seconds / budget
        if self._settings.max_steps is not None:
            share = max(share, trainer.step_count / self._settings.max_steps)
        return min(share, 1.0)

    def _evaluate(self, student: Student, trainer: Trainer) -> dict[str, Any]:
        settings = self._settings
        self._tell("evaluation", 0.0)
        module = self._target.module
        target = CausalLM(module, name=self._target.reference, eos=self._target.eos)
        trained = copy.deepcopy(student.module).to(module.device, module.dtype)
        draft = CausalLM(trained, name=self._out.name, eos=self._target.eos, vocabulary=student.vocabulary)
        found = agreement(target, draft, self._held, settings.evaluation_tokens)
        prompts = self._held[: settings.evaluation_prompts]
        rows: list[Acceptance] = []
        for n, (rule, temperature) in enumerate(RULES, 1):
            rows.append(
                acceptance(
                    target,
                    draft,
                    prompts,
                    rule=rule,
                    temperature=temperature,
                    tokens=settings.evaluation_tokens,
                    lookahead=settings.lookahead,
                    seed=settings.seed,
                )
            )
            self._tell("evaluation", n / len(RULES))
        return export.card(
            target=self._target,
            student=student,
            settings=settings,
            sampled_tokens=self._store.tokens,
            steps=trainer.step_count,
            positions=trainer.positions,
            seconds=(self._state.sampling_seconds, self._state.training_seconds),
            agreement=found,
            acceptance=rows,
            held=len(self._held),
        )

    def _low_precision_target(self) -> CausalLM:
        module = self._target.module
        dtype = getattr(torch, self._settings.dtype)
        if module.dtype == torch.float32 and dtype != torch.float32:
            module = copy.deepcopy(module).to(dtype)
        return CausalLM(module, name=self._target.reference, eos=self._target.eos, packed=None)

    def _read_state(self, identity: dict[str, Any]) -> _State:
        file = self._work / "state.json"
        if not file.exists():
            state = _State(identity)
            state.write(file)
            return state
        try:
            state = _State(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} is damaged: delete {self._work} to start afresh") from error
        if changed := _differences(state.identity, identity):
            raise ConfigError(
                f"{self._work} holds an unfinished run with other {', '.join(changed)}: give the same command again "
                "to finish it, delete it to start afresh, or choose another place"
            )
        return state

    def _save_state(self) -> None:
        self._state.write(self._work / "state.json")

    def _save_training(self, trainer: Trainer, file: Path) -> None:
        buffer = io.BytesIO()
        torch.save(trainer.state(), buffer)
        write_whole(file, buffer.getvalue())
        self._save_state()

    def _tell(
        self,
        stage: Literal["sampling", "training", "evaluation", "export"],
        done: float,
        left: float = 0.0,
        tokens: int = 0,
        loss: float | None = None,
        agreed: float | None = None,
    ) -> None:
        self._report(Progress(stage, min(done, 1.0), max(left, 0.0), tokens, loss, agreed))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = [name for name in new if name != "settings" and old.get(name) != new[name]]
    before, after = old.get("settings", {}), new["settings"]
    return [*names, *(name for name in after if before.get(name) != after[name])]


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else before + _SMOOTHING * (value - before)


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work.with_name(f".{work.name}.lock"), timeout=0):
            yield
    except Timeout as error:
        raise ConfigError(f"another run is working in {work}") from error
