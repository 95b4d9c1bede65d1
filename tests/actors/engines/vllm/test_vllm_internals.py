"""The installed vLLM's classes still have the methods that actors/engines/vllm/internals.py overrides.

What its model runner has is looked for when an engine starts (`internals.install`), and broken on purpose by
test_vllm_faults.py.
"""

from __future__ import annotations

import pytest
import vllm

from actors.engines.vllm import internals

MOVED = f"vLLM {vllm.__version__} has moved it: mend actors/engines/vllm/internals.py, and docs/private-apis.md"


@pytest.mark.parametrize("kind", [internals.PlatformWorker, internals.MultiprocExecutor])
@pytest.mark.parametrize("name", ["sample_tokens", "take_draft_token_ids"])
def test_workers_and_executors_hand_over_tokens_and_drafts(kind: type, name: str) -> None:
    assert callable(getattr(kind, name, None)), MOVED


def test_the_output_of_a_pass_can_carry_more() -> None:
    assert "__slots__" not in vars(internals.ModelRunnerOutput), MOVED
