"""A target that answers elsewhere: a running Outrider, or a vLLM server, asked over HTTP for samples to distill from.

Token ids go in and come out, with the server's best log-probabilities at temperature 1; both servers take a seed per
request, so the draws are theirs and can be had again. Outrider tells ids as an extension (`speculation.tokens`), vLLM
with `return_token_ids` and `return_tokens_as_token_ids`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import torch

from actors.errors import ConfigError, EngineError, OverloadedError, UnavailableError
from cluster.distillation.store import NEVER, Sample, padded
from deployments.client.http_connection import connection, header_value, server_root
from deployments.client.http_service import CONNECT_LIMIT_S, error_from
from deployments.client.retrying import Retries

if TYPE_CHECKING:
    from cluster.distillation.job import Target
    from cluster.distillation.prompts import Ids

MOST_LOGPROBS = 20
"""What both servers give at most, unless a vLLM server was started with a higher `max_logprobs`."""
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said aloud: both servers otherwise take what the model's generation_config.json names."""
LOOK_S = 0.5
"""How often to look whether to go on."""
_PROBE_TOKENS, _PROBE_TEMPERATURE = 8, 0.5
_TOLERANCE = 0.5
"""Nats: weights in bfloat16 or 8 bits are off by a tenth of it, another model by several times as much."""

OUTRIDERS_IDS: dict[str, Any] = {"speculation": {"tokens": True}}
VLLMS_IDS: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
"""What makes either server tell token ids; each refuses or ignores the other's."""


class DistantTarget:
    """Samples of a server (see sampler.Source). Make it, then `check` it against the target's own weights.

    url: the server's root, with or without /v1. answer: longest answer, in tokens. context: longest prompt and answer.
    top: log-probabilities kept per position; what the server does not give is filled up. concurrency: requests at once.
    retries: per request, for errors that may pass. model: which one to ask for; by default the only one.
    """

    def __init__(
        self,
        url: str,
        *,
        answer: int,
        context: int,
        top: int,
        key: str | None = None,
        model: str | None = None,
        concurrency: int = 32,
        retries: int = 6,
        pause_s: float = 0.5,
        limit_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = server_root(url)
        self._answer, self._context, self._top = answer, context, top
        self._model, self._concurrency = model, concurrency
        self._is_outrider: bool | None = None
        """Told by its card of the model, which is looked up once."""
        self.retries, self._pause_s = retries, pause_s
        self._key = header_value(key) if key else None
        self._timeout = httpx.Timeout(limit_s, connect=CONNECT_LIMIT_S)
        self._transport = transport

    def sample(
        self,
        prompts: Sequence[tuple[Ids, float]],
        generator: torch.Generator,
        go_on: Callable[[int], bool] = lambda tokens: True,
    ) -> list[Sample]:
        """See sampler.Source; answers under way when it is over are given up.

        Raises UnavailableError when a request fails for good, or what the server refuses it with.
        """
        seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()
        if self._is_outrider is None:
            asyncio.run(self._look_up(""))
        return asyncio.run(self._all([(*prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)], go_on))

    def check(self, target: Target, prompt: Ids) -> None:
        """Whether the server serves `target`. Raises ConfigError saying in what it differs.

        By the vocabulary's fingerprint where it is told, and by what the server says of a short answer to `prompt`:
        its log-probabilities must be, nearly, those of the target's weights.
        """
        asyncio.run(self._look_up(target.fingerprint))
        self._check_room(target, prompt)
        (probe,) = asyncio.run(self._all([(prompt, _PROBE_TEMPERATURE, 1)], lambda tokens: True, _PROBE_TOKENS))
        size = int(target.module.get_input_embeddings().num_embeddings)
        if int(torch.cat([probe.answer, probe.top_ids.flatten()]).max()) >= size:
            raise ConfigError(f"{self.url} answers with ids outside the target's vocabulary of {size}")
        text = torch.cat([probe.prompt, probe.answer]).long()[None].to(target.module.device)
        with torch.no_grad():
            logits = target.module(input_ids=text, use_cache=False).logits[0, len(probe.prompt) - 1 : -1]
        own = logits.float().log_softmax(-1).cpu().gather(1, probe.top_ids.long())
        told = probe.top_logp.float()
        counts = (told > -6) & (told.isfinite())
        off = float((own - told)[counts].abs().mean())
        if off > _TOLERANCE:
            raise ConfigError(
                f"{self.url} does not serve {target.reference}, or tells log-probabilities after temperature "
                f"(vLLM: --logprobs-mode raw_logprobs): they are off by {off:.2f} nats on average"
            )

    def _check_room(self, target: Target, prompt: Ids) -> None:
        if len(prompt) + _PROBE_TOKENS > self._context:
            raise ConfigError(f"a prompt of {len(prompt)} tokens leaves no room to try {self.url} with")

    def _connection(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self._concurrency)
        return connection(self.url, self._key, timeout=self._timeout, limits=limits, transport=self._transport)

    async def _look_up(self, fingerprint: str) -> None:
        async with self._connection() as http:
            told = (await self._request(http, "GET", "/v1/models", None))["data"]
        names = [str(one["id"]) for one in told]
        if self._model is None and len(names) == 1:
            self._model = names[0]
        if self._model not in names:
            raise ConfigError(f"{self.url} serves {', '.join(names) or 'no model'}: say which one with --served-model")
        self._is_outrider = told[names.index(self._model)].get("owned_by") == "outrider"
        found = told[names.index(self._model)].get("vocabulary_fingerprint")
        if found and fingerprint and found != fingerprint:
            raise ConfigError(f"{self.url} serves {self._model}, whose vocabulary is not the target's")

    async def _all(
        self, asked: Sequence[tuple[Ids, float, int]], go_on: Callable[[int], bool], longest: int | None = None
    ) -> list[Sample]:
        found: dict[int, Sample] = {}
        gate = asyncio.Semaphore(self._concurrency)
        async with self._connection() as http:

            async def one(number: int) -> None:
                prompt, temperature, seed = asked[number]
                async with gate:
                    body = self._body(prompt, temperature, seed, longest)
                    told = await self._request(http, "POST", "/v1/completions", body)
                    found[number] = self._sample(prompt, temperature, told)

            running = {asyncio.create_task(one(number)) for number in range(len(asked))}
            try:
                while running:
                    done, running = await asyncio.wait(running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                    if not go_on(sum(len(sample.answer) for sample in found.values())) and found:
                        break
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        return [found[number] for number in sorted(found)]

    def _body(self, prompt: Ids, temperature: float, seed: int, longest: int | None) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": min(longest or self._answer, self._context - len(prompt)),
            "temperature": temperature,
            **NEUTRAL,
            "seed": seed,
            "logprobs": min(self._top, MOST_LOGPROBS),
            **(OUTRIDERS_IDS if self._is_outrider else VLLMS_IDS),
        }

    async def _request(self, http: httpx.AsyncClient, method: str, path: str, body: Any) -> Any:
        async def attempt() -> Any:
            response = await http.request(method, path, json=body)
            if response.status_code != 200:
                raise error_from(response.status_code, response.content, response.headers)
            return response.json()

        passing = (OverloadedError, UnavailableError, httpx.TransportError)
        try:
            return await Retries(self.retries, self._pause_s).run(attempt, passing)
        except passing as error:
            raise UnavailableError(f"{self.url} does not answer: {error or type(error).__name__}") from error
        except (ValueError, httpx.HTTPError) as error:
            raise EngineError(f"{self.url} sent something that is no answer: {error}") from error

    def _sample(self, prompt: Ids, temperature: float, told: Any) -> Sample:
        try:
            choice = told["choices"][0]
            tokens, tops = _outrider(choice) if choice.get("speculation") else _vllm(choice)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{self.url} does not tell token ids: it must be Outrider, or a vLLM that knows return_token_ids"
            ) from error
        if not tokens:
            raise EngineError(f"{self.url} sent an empty answer")
        width = min(self._top, max(map(len, tops)))
        best = [sorted(top.items(), key=lambda pair: -pair[1])[:width] for top in tops]
        return padded(
            Sample(
                torch.tensor(prompt, dtype=torch.int32),
                torch.tensor(tokens, dtype=torch.int32),
                *_rows(best, width),
                temperature,
            ),
            self._top,
        )


def _rows(best: Sequence[Sequence[tuple[int, float]]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [L, width] and log-probabilities; places that a position does not fill hold what can never be."""
    ids = torch.zeros(len(best), width, dtype=torch.int32)
    logp = torch.full((len(best), width), NEVER, dtype=torch.float16)
    for place, pairs in enumerate(best):
        ids[place, : len(pairs)] = torch.tensor([token for token, _ in pairs], dtype=torch.int32)
        logp[place, : len(pairs)] = torch.tensor([value for _, value in pairs], dtype=torch.float16)
    return ids, logp


def _outrider(choice: dict[str, Any]) -> tuple[list[int], list[dict[int, float]]]:
    """Ids, and the best log-probabilities by id, of Outrider's `speculation.tokens`."""
    told = choice["speculation"]["tokens"]
    return [int(one["id"]) for one in told], [{int(t): float(p) for t, p in one["top"]} for one in told]


def _vllm(choice: dict[str, Any]) -> tuple[list[int], list[dict[int, float]]]:
    """Of vLLM's `token_ids` and `logprobs.top_logprobs`, whose keys are `token_id:N`; the drawn token is among them."""
    tops = [
        {int(name.removeprefix("token_id:")): float(value) for name, value in top.items()}
        for top in choice["logprobs"]["top_logprobs"]
    ]
    tokens = [int(token) for token in choice["token_ids"]]
    if len(tops) != len(tokens):
        raise ValueError("as many tokens as log-probabilities")
    return tokens, tops
