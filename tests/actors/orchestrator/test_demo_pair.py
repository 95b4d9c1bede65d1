"""The demo model and its draft through both actors: 200 prompts, 16 at a time, speculation on against off."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from pace import Pace

from actors import telemetry
from actors.messages import GenerationRequest
from actors.orchestrator.admission import Admission
from actors.settings import OrchestratorSettings, SamplingSettings
from actors.text.answer_comparison import Comparison, Reference
from cluster.config.deployment import DeploymentConfig
from cluster.models import factory

PROMPTS = json.loads((Path(__file__).parents[3] / "cluster/models/demo_draft/held-prompts.json").read_text())
AT_ONCE = 16
TOKENS = 12


def config(dtype: str = "float32") -> DeploymentConfig:
    lookahead = {"mode": "fixed", "maximum": 4}  # whatever is there is verified, worth it on this machine or not
    settings = {"slots": AT_ONCE, "context": 512, "queue": 1000, "lookahead": lookahead}
    return DeploymentConfig.model_validate(
        {
            "target": {"settings": settings, "dtype": dtype},
            "draft": {"settings": {"slots": AT_ONCE, "context": 512}, "dtype": dtype},
        }
    )


def requests(codec, count: int, temperature: float, **sampling) -> list[GenerationRequest]:
    """Chat prompts of 20 to 150 tokens: one to five of the held-out prompts in a row."""
    rng = random.Random(11)
    made = []
    for i in range(count):
        text = " ".join(rng.sample(PROMPTS, rng.randrange(1, 6)))
        tokens = codec.encode_chat([{"role": "user", "content": text}])
        settings = SamplingSettings(temperature=temperature, max_tokens=TOKENS, seed=i, **sampling)
        made.append(GenerationRequest(id=f"{temperature}-{sampling}-{i}", sampling=settings, tokens=tokens))
    return made


async def run(local, wanted) -> list[Reference]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(request) -> Reference:
        async with gate:
            deltas = [delta async for delta in local.orchestrator.generate(request)]
        tokens = [token for delta in deltas for token in delta.tokens]
        return Reference(tokens, [margin for delta in deltas for margin in delta.margins])

    return list(await asyncio.gather(*map(one, wanted)))


@pytest.fixture(scope="module")
def pair():
    """Both models, loaded one after the other: transformers does not load two at once in one process."""
    deployment = config()
    return factory.target_model(deployment), factory.draft_model(deployment)


@pytest.mark.demo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("temperature", "prompts"), [(0.0, 100), (0.8, 100)])
async def test_speculation_changes_no_token(start, pair, temperature, prompts) -> None:
    """100 prompts greedy and 100 seeded at temperature 0.8; near-ties are counted, nothing else may differ."""
    deployment = config()
    facts = factory.text_facts(deployment)
    pace = Pace()
    async with start(
        make_target=lambda: pace.target(pair[0]),
        make_draft=lambda: pace.draft(pair[1]),
        admission=Admission(facts.codec, facts.vocabulary, facts.context),
        target_settings=deployment.resolved_target(),
        draft_settings=deployment.resolved_draft(),
        settings=OrchestratorSettings(discovery_period_s=0.1, stall_timeout_s=120),
    ) as local:
        plain = await run(local, requests(facts.codec, prompts, temperature, speculation=False, margins=True))
        assert local.recorder.total(telemetry.PROPOSED) == 0
        speculated = await run(local, requests(facts.codec, prompts, temperature))
        tally = Comparison()
        for i, (reference, answer) in enumerate(zip(plain, speculated, strict=True)):
            tally.add(f"prompt {i}", reference, answer.tokens)
        print(tally)
        assert tally.same, tally.different
        assert tally.ties <= 3  # a margin below 1e-3 is rare: more would mean that the margins are wrong
        # Some drafts are there for most passes (the pace), all are tried, and about four in ten are right.
        assert local.recorder.total(telemetry.ACCEPTED) > 100
