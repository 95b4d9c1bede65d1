"""What is counted is what clients get: end-of-sequence inside an accepted block, accepted against drafted tokens."""

from __future__ import annotations

import asyncio

from actors import telemetry
from actors.engines.emulated.language import Agreement, Language, expected_tokens
from actors.engines.emulated.presets import DraftSpec, TargetSpec

LANGUAGE = Language(eos_probability=0.05)
TWIN = Agreement(acceptance=1.0, spread=0.0)
"""Every draft token is accepted, so that most answers end inside a block."""


async def test_counters_equal_usage_where_answers_end_inside_a_block(start, request_for) -> None:
    target = TargetSpec(pass_ms=4, prompt_token_ms=0, language=LANGUAGE)
    draft = DraftSpec(step_ms=0.3, language=LANGUAGE, agreement=TWIN)
    wanted = [request_for(f"r{i}", (i + 1,), max_tokens=80) for i in range(24)]
    async with start(target_spec=target, draft_spec=draft) as local:

        async def ask(request):
            return [delta async for delta in local.orchestrator.generate(request)]

        answers = await asyncio.gather(*(ask(request) for request in wanted))
        recorder = local.recorder
        for request, deltas in zip(wanted, answers, strict=True):
            tokens = [token for delta in deltas for token in delta.tokens]
            assert tokens == list(expected_tokens(request.tokens, 80, None, LANGUAGE))
            assert deltas[-1].usage.completion_tokens == len(tokens)
            assert deltas[-1].usage.accepted_tokens <= deltas[-1].usage.proposed_tokens
        usage = sum(deltas[-1].usage.completion_tokens for deltas in answers)
        assert recorder.total(telemetry.EMITTED) == usage == recorder.total(telemetry.COMMITTED)
        ended_in_a_block = sum(
            deltas[-1].finish == "stop" and deltas[-1].origins[-1] == "accepted" for deltas in answers
        )
        assert ended_in_a_block > 0
        accepted, proposed, drafted = (
            recorder.total(metric) for metric in (telemetry.ACCEPTED, telemetry.PROPOSED, telemetry.DRAFTED)
        )
        assert 0 < accepted <= proposed <= drafted
