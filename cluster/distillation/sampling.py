"""The first stage: answers recorded elsewhere are taken in, and the target answers the prompts, shard by shard."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.errors import ConfigError
from cluster.distillation.job import Job, Target
from cluster.distillation.prompts import Ids
from cluster.distillation.sampler import Sampler, Source
from cluster.distillation.settings import DistillSettings
from cluster.distillation.store import Sample, padded
from cluster.distillation.student import choose_vocabulary

_TELL_SECONDS = 2.0


def take_in(job: Job, traffic: Iterable[Sample], held: Sequence[Ids]) -> None:
    """Store answers recorded elsewhere, but those to `held` prompts. Does nothing if it was done before.

    Raises ConfigError for ids of another model.
    """
    if job.state.imported:
        return
    for shard in job.store.shards:  # of an import that did not end
        shard.unlink()
    kept_back = set(held)
    samples = (sample for sample in traffic if tuple(sample.prompt.tolist()) not in kept_back)
    while chunk := list(islice(samples, job.settings.shard)):
        job.store.append([_fitted(job, sample) for sample in chunk])
    job.state.imported = True
    job.save()


def sample(job: Job, prompts: Sequence[Ids], source: Source | None) -> None:
    """Answers until the time for it is over, or there are as many tokens as are wanted.

    source: who answers; None samples the target here. Raises ConfigError if there is nothing to train on.
    """
    if job.settings.sampling_share == 0:
        job.state.sampled = True
        if not job.store.shards:
            raise ConfigError("without time for sampling there must be recorded answers to train on", "sampling_share")
    if job.state.sampled:
        return
    chosen = source or local_sampler(job.target, job.settings, answer=job.settings.answer, eos=job.target.eos)
    while not job.state.sampled:
        number = len(job.store.shards)
        watch = _Watch(job)
        generator = torch.Generator().manual_seed(job.settings.seed * 1_000_003 + number)
        job.store.append(chosen.sample(_asked(job, prompts, number), generator, watch))
        job.state.sampling_seconds += watch.seconds
        job.state.sampled = _share_done(job, job.state.sampling_seconds, job.store.tokens) >= 1
        job.save()
        watch.tell(job.store.tokens, job.state.sampling_seconds)


def vocabulary(job: Job, start: Tensor | None) -> Tensor | None:
    """The ids that the draft may propose: `start`, where the settings say so, or the likeliest in the samples."""
    if job.settings.vocabulary == "start":
        return start
    size = int(job.target.module.get_output_embeddings().weight.shape[0])
    if job.settings.vocabulary is None or job.settings.vocabulary >= size:
        return None
    mass = torch.zeros(size, dtype=torch.float64)
    for one in job.store.samples():
        mass.scatter_add_(0, one.top_ids.long().flatten(), one.top_logp.double().exp().flatten())
    return choose_vocabulary(mass, job.settings.vocabulary, job.target.eos)


class _Watch:
    """Looks on while a shard is sampled: tells how far it is, and ends it when the time is over."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = job.store.tokens
        self._started = self._told = job.clock()

    @property
    def seconds(self) -> float:
        """Since the shard was begun."""
        return self._job.clock() - self._started

    def __call__(self, tokens: int) -> bool:
        """tokens: of this shard, so far. Whether to go on."""
        job, now = self._job, self._job.clock()
        seconds = job.state.sampling_seconds + now - self._started
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            self.tell(self._before + tokens, seconds)
        return seconds < job.sampling_budget

    def tell(self, tokens: int, seconds: float) -> None:
        """Report `tokens` in all, after `seconds` of sampling."""
        job = self._job
        done = _share_done(job, seconds, tokens)
        left = min(job.sampling_budget - seconds, seconds * (1 / done - 1) if done else job.sampling_budget)
        rate = (tokens - self._before) / max(self.seconds, 1e-9)
        job.tell("sampling", done, max(left, 0.0) + job.training_budget, tokens=tokens, rate=rate)


def _share_done(job: Job, seconds: float, tokens: int) -> float:
    done = seconds / job.sampling_budget
    if job.settings.max_tokens is not None:
        done = max(done, tokens / job.settings.max_tokens)
    return done


def _asked(job: Job, prompts: Sequence[Ids], number: int) -> list[tuple[Ids, float]]:
    """Prompts and temperatures of a shard. Every prompt has its turn before any has its second."""
    settings = job.settings
    chosen: list[tuple[Ids, float]] = []
    turn, order = -1, list[int]()
    for place in range(number * settings.shard, (number + 1) * settings.shard):
        if place // len(prompts) != turn:
            turn, order = place // len(prompts), list(range(len(prompts)))
            random.Random(f"{settings.seed}/prompts/{turn}").shuffle(order)
        draw = random.Random(f"{settings.seed}/temperature/{place}")
        chosen.append((prompts[order[place % len(prompts)]], draw.choice(settings.temperatures)))
    return chosen


def local_sampler(target: Target, settings: DistillSettings, *, answer: int, eos: tuple[int, ...]) -> Sampler:
    """The target itself, on its device, in the arithmetic of the settings; answers of at most `answer` tokens."""
    module, dtype = target.module, getattr(torch, settings.dtype)
    if module.dtype == torch.float32 and dtype != torch.float32:
        module = copy.deepcopy(module).to(dtype)
    model = CausalLM(module, name=target.reference, eos=eos, packed=None)
    return Sampler(model, answer=answer, top=settings.top, slots=settings.slots, context=settings.context)


def _fitted(job: Job, one: Sample) -> Sample:
    """With as many log-probabilities per position as all others."""
    size = int(job.target.module.get_input_embeddings().num_embeddings)
    if max(int(t.max()) for t in (one.prompt, one.answer, one.top_ids)) >= size:
        raise ConfigError(f"the recorded traffic holds ids outside the target's vocabulary of {size}")
    return padded(one, job.settings.top)
