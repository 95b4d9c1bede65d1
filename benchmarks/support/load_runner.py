"""Runs loads on rigs: warm-up, repeats, checks of every answer. What scenarios are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from actors.engines.emulated.language import expected_tokens
from actors.engines.emulated.presets import target_spec
from actors.messages import GenerationRequest, extend_key
from actors.settings import SamplingSettings
from benchmarks.support.actor_rig import Answer, Rig, RigPlan, Run
from benchmarks.support.figures import Figures, figures
from cluster.config.deployment import DeploymentConfig

PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one repeat: `sequences` of them, `concurrency` at a time."""

    sequences: int
    tokens: int
    temperature: float = 0.0
    concurrency: int | None = None
    vary: float = 0.0
    """Answers' lengths are spread evenly over tokens ± this share, so that sequences do not end together."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Taken in turn; made up when empty."""
    ignore_eos: bool = True

    @property
    def at_once(self) -> int:
        return self.concurrency or self.sequences

    def requests(self, name: str, repeat: int) -> list[GenerationRequest]:
        """The same prompts and seeds for every way of decoding, other ones in every repeat."""
        made = []
        for i in range(self.sequences):
            number = repeat * self.sequences + i
            share = 2 * ((i * 0.618034) % 1.0) - 1 if self.vary else 0.0
            length = max(1, round(self.tokens * (1 + self.vary * share)))
            sampling = SamplingSettings(
                temperature=self.temperature, max_tokens=length, seed=number, ignore_eos=self.ignore_eos
            )
            prompt = self.prompts[number % len(self.prompts)] if self.prompts else made_up_prompt(number)
            made.append(GenerationRequest(f"{name}-{repeat}-{i}", sampling, tokens=prompt))
        return made


def made_up_prompt(number: int, vocabulary: int = 1000) -> tuple[int, ...]:
    """Prompt `number`: ids below `vocabulary`."""
    return tuple(extend_key(number, place) % vocabulary for place in range(PROMPT_TOKENS))


@dataclass(slots=True)
class Measured:
    """Repeats of one load on one deployment."""

    runs: list[Run]
    repeats: list[Figures] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Answers that are not what the emulated target says; counted by `Lab.measure`."""
        return int(sum(repeat["wrong_answers"] for repeat in self.repeats))


@dataclass(slots=True)
class Lab:
    """start: builds a rig. say: takes progress, a line at a time."""

    start: Callable[[RigPlan], Awaitable[Rig]]
    repeats: int = 5
    link_delay_ms: float = 0.0
    wires: bool = True
    say: Callable[[str], None] = lambda line: None

    async def measure(self, name: str, config: DeploymentConfig, load: Load, repeats: int | None = None) -> Measured:
        """Warm up, then run `load` several times on a rig of its own."""
        rig = await self.start(RigPlan(config, self.link_delay_ms, self.wires))
        measured = Measured([])
        try:
            small = Load(min(load.sequences, 4), min(load.tokens, 64), load.temperature, prompts=load.prompts)
            await rig.run(small.requests(f"warm-up-{name}", 1000), small.at_once)
            for repeat in range(self.repeats if repeats is None else repeats):
                run = await rig.run(load.requests(name, repeat), load.at_once)
                found = figures(run)
                found["wrong_answers"] = wrong_answers(run.answers, config, load)
                measured.runs.append(run)
                measured.repeats.append(found)
                self.say(f"  {name}, repeat {repeat + 1}: {found['tokens_per_s']:.1f} tokens/s")
        finally:
            await rig.close()
        return measured


def wrong_answers(answers: Sequence[Answer], config: DeploymentConfig, load: Load) -> int:
    """How many answers differ from what the emulated target must say (0 for real models: they are not checked)."""
    wrong = sum(answer.error is not None for answer in answers)
    if config.target.engine != "emulated":
        return wrong
    language = target_spec(config.target.model, config.target.engine_kwargs).language
    for answer in answers:
        seed = answer.seed if load.temperature > 0 else None
        truth = expected_tokens(answer.prompt, len(answer.tokens), seed, language)
        wrong += answer.error is None and tuple(answer.tokens) != truth
    return wrong
