"""What vLLM's processes find in their environment. Needs no vLLM."""

from __future__ import annotations

import os

import pytest

from actors.engines.vllm.engine import _environment


@pytest.mark.parametrize(("said", "found"), [(None, "1"), ("0", "0")])
def test_vllm_tells_nobody_what_it_serves_unless_asked_to(
    monkeypatch: pytest.MonkeyPatch, said: str | None, found: str
) -> None:
    """And what was put there for its start is taken away again."""
    name = "VLLM_NO_USAGE_STATS"
    monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(name, said)
    with _environment(1):
        assert os.environ[name] == found
    assert os.environ.get(name) == said
