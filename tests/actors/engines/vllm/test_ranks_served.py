"""The transformers engine on two tensor-parallel ranks, each an actor in a bundle of its own, behind HTTP."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from vllm_stack import CONTEXT, byte_tokenizer, checkpoint, processes

from cluster.config.deployment import load_config
from deployments.runtime.local import application

pytestmark = [pytest.mark.ray, pytest.mark.slow]  # a group is built twice, each rank importing torch


@pytest.fixture
def url(ray_port: int, tmp_path: Path) -> Iterator[str]:
    byte_tokenizer(tmp_path)
    raw = {
        "name": "ranks",
        "model_id": "tiny",
        "target": {
            "model": checkpoint(tmp_path),
            "tensor_parallel_size": 2,
            "settings": {"slots": 4, "context": CONTEXT},
        },
        "draft": {"kind": "prompt_lookup", "settings": {"context": CONTEXT}},
        "ingress": {"port": ray_port, "route_prefix": "/ranks"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with application(load_config(raw)) as address:
            yield address


def complete(url: str) -> str:
    body: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 40, "temperature": 0, "seed": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_group_is_served_and_replaced_when_a_rank_dies(url: str) -> None:
    """While there is no target, requests wait for one; so the second answer comes from the new group."""
    first = complete(url)
    assert first
    [rank] = processes("RankActor")
    killed = psutil.Process(rank)
    killed.kill()
    killed.wait(timeout=60)
    assert complete(url) == first
    [new] = processes("RankActor")
    assert new != rank
