"""A vLLM 0.32 server on paper: /v1/models and /v1/completions as its own code serialises them, answered by a model.

vllm-completion.json holds what vLLM 0.32 itself (its serving code, given the tokens and scores in it) makes of a
request; a test holds the server here to that shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from small_targets import EOS

RECORDED = json.loads(Path(__file__).with_name("vllm-completion.json").read_text())


@dataclass
class FakeVllm:
    """failures: HTTP statuses to answer the first requests with. processed: tells scores after temperature."""

    module: Any
    names: tuple[str, ...] = ("tiny",)
    failures: list[int] = field(default_factory=list)
    processed: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _open: int = 0

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        import asyncio

        if self.failures:
            status = self.failures.pop(0)
            error = {"message": "busy", "type": "ServiceUnavailable", "param": None, "code": status}
            return httpx.Response(status, json={"error": error}, headers={"retry-after": "0"})
        if request.url.path == "/v1/models":
            cards = [{"id": n, "object": "model", "created": 5, "owned_by": "vllm", "root": n} for n in self.names]
            return httpx.Response(200, json={"object": "list", "data": cards})
        assert request.url.path == "/v1/completions"
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        await asyncio.sleep(0)  # others come in
        self._open -= 1
        body = json.loads(request.content)
        self.asked.append(body)
        return httpx.Response(200, json=self._completion(body))

    @torch.no_grad()
    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(body["seed"])
        text, tokens, tops = list(body["prompt"]), list[int](), list[dict[str, float]]()
        while len(tokens) < body["max_tokens"] and EOS not in tokens:
            logits = self.module(input_ids=torch.tensor([text])).logits[0, -1]
            heat = body["temperature"]
            p = (logits / heat).softmax(-1) if heat else torch.nn.functional.one_hot(logits.argmax(), len(logits))
            token = int(torch.multinomial(p.float(), 1, generator=generator))
            scores = ((logits / heat) if self.processed else logits).log_softmax(-1)
            best = [token, *scores.topk(body["logprobs"]).indices.tolist()]  # the drawn one first, whatever its rank
            tops.append({f"token_id:{t}": max(float(scores[t]), -9999.0) for t in best})
            text.append(token)
            tokens.append(token)
        names = [f"token_id:{token}" for token in tokens]
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 5,
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "logprobs": {
                        "text_offset": [0] * len(tokens),
                        "token_logprobs": [top[name] for name, top in zip(names, tops, strict=True)],
                        "tokens": names,
                        "top_logprobs": tops,
                    },
                    "finish_reason": "stop" if tokens[-1] == EOS else "length",
                    "stop_reason": None,
                    "token_ids": tokens,
                    "prompt_logprobs": None,
                    "prompt_token_ids": body["prompt"],
                    "routed_experts": None,
                }
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {
                "prompt_tokens": len(body["prompt"]),
                "total_tokens": len(text),
                "completion_tokens": len(tokens),
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
