"""The bench with a real pair: the demo models on this machine's CPU, beside transformers' own assisted generation.

Everything decodes greedily. Outrider keeps target and draft on a core each; plain decoding and the peer may use all
of these cores, and of plain decoding with one core and with all, the faster is what others are measured against.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deployments
from actors.settings import TargetSettings
from benchmarks.support.actor_rig import Run
from benchmarks.support.draft_alone import DraftAlone, StepTimes, step_times
from benchmarks.support.figures import Figures, summarise
from benchmarks.support.goals import Goal
from benchmarks.support.load_runner import Lab, Load, Measured
from benchmarks.support.modes import in_mode
from benchmarks.support.report import Row, Section
from cluster.config.deployment import DeploymentConfig, DraftTier, Resources, load_config

Answers = dict[tuple[int, ...], tuple[int, ...]]
"""Prompt -> answer."""
CONFIG = Path(deployments.__file__).with_name("demo.yaml")
CHAT = (
    "What is the capital of France, and what is it known for?",
    "List five facts about glaciers.",
    "Explain in simple words why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
)
_PASSAGE = (
    "The harbour town lies where the river meets the sea. Every morning the fishing boats leave before sunrise, and "
    "by noon the market on the quay is full of people from the villages inland. In winter the storms keep the boats "
    "in port, and the fishermen mend their nets in the old boathouse while their children listen to stories about "
    "the great flood that once carried the church bell out to sea."
)
EDITS = (
    f"Copy this text, but write 'village' instead of 'town':\n\n{_PASSAGE}",
    f"Repeat the following text exactly, but replace 'morning' with 'evening':\n\n{_PASSAGE}",
)


async def demo(lab: Lab, *, tokens: int = 64) -> tuple[list[Section], Run]:
    """Goal 6: the demo pair against assisted generation and plain decoding, on chat and on editing prompts."""
    from cluster.models.factory import prepare, text_facts

    config = load_config(CONFIG)
    prepare(config)
    codec = text_facts(config).codec
    chat = _load(codec, CHAT, tokens)
    edits = _load(codec, EDITS, 2 * tokens)
    section = Section("demo pair, chat prompts", {"target": config.target.model, "draft": config.draft.model})
    plain, truth = await _plain(lab, config, chat, section)
    pair = await lab.measure("outrider", config, chat)
    section.rows.append(Row("outrider", summarise(pair.repeats)))
    peer = await _assisted(lab, config, chat)
    section.rows.append(Row("transformers, assisted", summarise(peer)))
    speeds = [_over(row, plain) for row in section.rows]
    section.goals.append(Goal("outrider over assisted generation", speeds[-2] / speeds[-1], 1.3))
    section.goals.append(Goal("outrider over plain decoding, chat", speeds[-2], 1.25))
    section.notes.append(_differing(pair, truth))
    alone = await _alone(config, truth)
    served = step_times([(s.ended - s.started, s.cpu_s, s.rows) for r in pair.runs for d in r.drafts for s in d.steps])
    section.notes.append(f"a draft step alone: {alone.told()}; served: {served.told()}")

    editing = Section("demo target with prompt lookup, editing prompts", {"target": config.target.model})
    plain, truth = await _plain(lab, config, edits, editing)
    lookup = await lab.measure("prompt lookup", _with_lookup(config), edits)
    editing.rows.append(Row("outrider, prompt lookup", summarise(lookup.repeats)))
    speeds = [_over(row, plain) for row in editing.rows]
    editing.notes.append(_differing(lookup, truth))
    editing.goals.append(Goal("prompt lookup over plain decoding, edits", speeds[-1], 2.0))
    return [section, editing], pair.runs[-1]


async def _plain(lab: Lab, config: DeploymentConfig, load: Load, section: Section) -> tuple[float, Answers]:
    """Rows of plain decoding on one core and on all that the pair has. Returns the better speed, and the answers."""
    single = in_mode(config, "plain", 1)
    measured: list[Measured] = []
    for label, plan in (("plain, one core", single), ("plain, all cores", _on_all_cores(single))):
        measured.append(await lab.measure(label, plan, load))
        section.rows.append(Row(label, summarise(measured[-1].repeats)))
    answers = {answer.prompt: tuple(answer.tokens) for answer in measured[0].runs[0].answers}
    return max(row.figures["tokens_per_s"].median for row in section.rows), answers


def _over(row: Row, plain: float) -> float:
    row.speedup = row.figures["tokens_per_s"].median / plain
    return row.speedup


def _load(codec: Any, texts: Sequence[str], tokens: int) -> Load:
    prompts = tuple(codec.encode_chat([{"role": "user", "content": text}]) for text in texts)
    return Load(len(prompts), tokens, concurrency=1, prompts=prompts, ignore_eos=False)


def _cores(config: DeploymentConfig) -> tuple[int, ...]:
    both = {*(config.target.resources.cores or ()), *(config.draft.resources.cores or ())}
    return tuple(sorted(both or range(os.cpu_count() or 1)))


def _on_all_cores(config: DeploymentConfig) -> DeploymentConfig:
    cores = _cores(load_config(CONFIG))
    resources = Resources(num_cpus=len(cores), threads=len(cores), cores=cores)
    return config.model_copy(update={"target": config.target.model_copy(update={"resources": resources})})


def _with_lookup(config: DeploymentConfig) -> DeploymentConfig:
    """Looking up takes no core of its own: the target has all."""
    wide = _on_all_cores(config)
    lookahead = wide.target.settings.lookahead.model_copy(update={"maximum": 12})
    settings: TargetSettings = wide.target.settings.model_copy(update={"lookahead": lookahead})
    target = wide.target.model_copy(update={"settings": settings})
    draft = DraftTier(kind="prompt_lookup", settings=config.draft.settings)
    return wide.model_copy(update={"target": target, "draft": draft})


def _differing(measured: Measured, truth: Answers) -> str:
    answers = [answer for run in measured.runs for answer in run.answers]
    same = sum(truth.get(answer.prompt) == tuple(answer.tokens) for answer in answers)
    return f"{same} of {len(answers)} answers are token for token those of plain decoding"


class Assisted:
    """transformers' assisted generation with the same pair, as it comes. A Ray actor, or a plain object."""

    def __init__(self, config: DeploymentConfig, cores: tuple[int, ...]) -> None:
        import torch

        from cluster.models.factory import pin
        from cluster.models.references import DEMO_DRAFT
        from cluster.models.weights import load_draft, load_module

        pin(Resources(threads=len(cores), cores=cores))
        self._target = load_module(config.target.model, torch.float32).eval()
        self._draft = load_draft(DEMO_DRAFT, torch.float32)[0].eval()

    def run(self, load: Load) -> Figures:
        """Answer the load's prompts one after the other."""
        import torch

        counted, seconds = 0, 0.0
        for request in load.requests("assisted", 0):
            assert request.tokens is not None  # loads are made of token ids
            prompt = torch.tensor([request.tokens])
            started = time.monotonic()
            with torch.inference_mode():
                answer = self._target.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    assistant_model=self._draft,
                    max_new_tokens=load.tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            seconds += time.monotonic() - started
            counted += answer.shape[1] - prompt.shape[1]
        return {"tokens": counted, "wall_s": seconds, "tokens_per_s": counted / seconds}


async def _alone(config: DeploymentConfig, truth: Answers) -> StepTimes:
    """The draft's steps with nothing else at work, on its own core."""
    import ray

    draft = ray.remote(num_cpus=0)(DraftAlone).remote(config)
    try:
        times: StepTimes = await draft.run.remote(truth)
        return times
    finally:
        ray.kill(draft)


async def _assisted(lab: Lab, config: DeploymentConfig, load: Load) -> list[Figures]:
    import ray

    peer = ray.remote(num_cpus=0)(Assisted).remote(config, _cores(config))
    try:
        await peer.run.remote(Load(1, 16, prompts=load.prompts))
        found = []
        for repeat in range(lab.repeats):
            found.append(await peer.run.remote(load))
            lab.say(f"  transformers, assisted, repeat {repeat + 1}: {found[-1]['tokens_per_s']:.1f} tokens/s")
    finally:
        ray.kill(peer)
    return found
