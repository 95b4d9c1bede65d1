"""One default on every door: the configuration's, else the model's generation_config, else OpenAI's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.messages import GenerationRequest
from actors.settings import SamplingSettings
from cluster.config.deployment import load_config
from cluster.models.default_sampling import completed, default_sampling, of_checkpoint
from deployments.client.request_builder import request_for


def checkpoint(folder: Path, told: Any) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(told if isinstance(told, str) else json.dumps(told))
    return folder


@pytest.mark.parametrize(
    ("told", "values"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": False, "eos_token_id": 2},
         {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"repetition_penalty": 1.1, "min_p": 0.05, "max_new_tokens": 9}, {"repetition_penalty": 1.1, "min_p": 0.05}),
        ({"temperature": None, "top_p": 0, "top_k": True, "repetition_penalty": "x"}, {}),
        ({"bos_token_id": 1}, {}),
        ([1], {}),
        ("{", {}),
    ],
)  # fmt: skip
def test_what_a_model_says(tmp_path: Path, told: Any, values: dict[str, float]) -> None:
    assert of_checkpoint(checkpoint(tmp_path, told)) == values


def test_nothing_is_said(tmp_path: Path) -> None:
    assert of_checkpoint(tmp_path) == {}
    emulated = {"target": {"engine": "emulated", "model": "emulated:h100-70b"}, "draft": {"kind": "none"}}
    assert default_sampling(load_config(emulated)) == {}


def test_the_configuration_goes_before_the_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"temperature": 0.6, "top_k": 20})

    def of(**said: Any) -> dict[str, float]:
        return default_sampling(load_config({"target": {"model": str(folder), "default_sampling": said}}))

    assert of() == {"temperature": 0.6, "top_k": 20}
    assert of(temperature=0.0, top_p=0.5) == {"temperature": 0.0, "top_k": 20, "top_p": 0.5}
    assert of(from_model=False, top_p=0.5) == {"top_p": 0.5}


def test_what_a_request_says_goes_before_both() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    for request in (request_for("a", {"top_k": 0}), GenerationRequest("a", SamplingSettings(top_k=0), text="a")):
        got = completed(request, defaults).sampling
        assert (got.temperature, got.top_k, got.top_p) == (0.6, 0, 1.0)
    said = completed(request_for("a", {"temperature": 1.0}), defaults).sampling
    assert said.temperature == 1.0


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_http_leaves_unsaid_what_is_unsaid(route: str) -> None:
    import httpx
    from tiny import Reciter, byte_codec

    from deployments.ingress.http_app import http_app
    from deployments.ingress.service import Served

    codec = byte_codec()
    reciter = Reciter(codec)
    app = http_app(reciter, codec, Served("tiny", context=64, sampling={"temperature": 0.6}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body: dict[str, Any] = (
            {"prompt": "a"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        )
        for more in ({}, {"temperature": None}, {"temperature": 1.0, "top_p": 0.5}):
            assert (await http.post(route, json=body | more)).status_code == 200
        (model,) = (await http.get("/v1/models")).json()["data"]
        info = (await http.get("/tokenizer_info")).json()
    names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    said = [request.sampling.model_fields_set & names for request in reciter.requests]
    assert said == [set(), set(), {"temperature", "top_p"}]
    assert model["default_sampling"] == {"temperature": 0.6}
    assert (info["eos_token"], info["bos_token"], info["vocab_size"]) == ("<|end|>", None, codec.vocabulary)
    assert info["chat_template"].startswith("{% for m in messages %}")
