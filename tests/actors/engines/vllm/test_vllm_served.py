"""The whole application with `engine: vllm`: Serve, HTTP, both tiers, on a tiny checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_stack import CONTEXT, byte_tokenizer, checkpoint, module

from cluster.config.deployment import load_config
from deployments.runtime.local import application

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("served"))
    byte_tokenizer(path)
    return checkpoint(path)


@contextmanager
def served(folder: str, port: int, **deployment: Any) -> Iterator[str]:
    raw = {
        "name": "vllm",
        "model_id": "tiny",
        "target": {
            "engine": "vllm",
            "model": folder,
            "engine_kwargs": {"enforce_eager": True},
            "settings": {
                "slots": 4,
                "context": CONTEXT,
                "lookahead": {"mode": "fixed", "maximum": 4, "wait": "full", "max_wait_ms": 200},
            },
        },
        "draft": {"model": folder, "settings": {"slots": 4, "context": CONTEXT}},
        "ingress": {"port": port, "route_prefix": "/vllm"},
        **deployment,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with application(load_config(raw)) as address:
            yield address


@pytest.fixture(scope="module")
def url(ray_port: int, folder: str) -> Iterator[str]:
    with served(folder, ray_port) as address:
        yield address


LENGTH = 180
"""As long as the context allows: what decodes plainly before the draft's first answer is here, is over in a second."""


def complete(url: str, **body: Any) -> dict[str, Any]:
    request = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": LENGTH, "ignore_eos": True, **body}
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_vllm_is_served(url: str, temperature: float) -> None:
    """A pass of this target takes less time than a draft's answer: passes are held until the draft has caught up."""
    plain = complete(url, temperature=temperature, seed=7, speculation=False)
    drafted = complete(url, temperature=temperature, seed=7)
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["usage"]["completion_tokens"] == LENGTH
    accepted = drafted["usage"]["completion_tokens_details"]["accepted_draft_tokens"]
    assert accepted > 10  # of 144, if the draft were there from the first pass on


def test_a_grammar_holds_in_vllms_worker(url: str) -> None:
    answer = complete(
        url, temperature=1.0, seed=1, structured_outputs={"choice": ["yes, it is", "no"]}, ignore_eos=False
    )
    assert answer["choices"][0]["text"] in ("yes, it is", "no")


@pytest.mark.slow
def test_a_relaxed_rule_is_marked_in_what_vllm_answers(ray_port: int, folder: str, tmp_path: Path) -> None:
    """A deployment of its own, because the rule is the deployment's; the draft is the target with other weights."""
    module(0.03).save_pretrained(tmp_path)
    byte_tokenizer(tmp_path)
    draft = {"model": str(tmp_path), "settings": {"slots": 4, "context": CONTEXT}}
    with served(folder, ray_port, rule="typical", draft=draft) as address:
        answer = complete(address, temperature=0.9, seed=7)
        again = complete(address, temperature=0.9, seed=7, speculation=False)
        [card] = httpx.get(f"{address}/v1/models", timeout=60).json()["data"]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_draft_tokens"] > 10
    assert details["relaxed"] is True
    assert answer["choices"][0]["speculation"]["exact"] is False
    assert card["exact"] is False
    assert again["usage"]["completion_tokens_details"]["accepted_draft_tokens"] == 0
