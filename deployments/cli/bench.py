"""`outrider bench`: a load on a server that runs, with the figures that its clients feel."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.errors import OutriderError
from deployments.cli.options import AsJson, Key, Url
from deployments.client.address import DEFAULT_URL

if TYPE_CHECKING:
    from deployments.client.http_service import HttpService
    from deployments.client.request_builder import Prompt
    from deployments.client.timing import Timing
    from deployments.ingress.service import Service

EXAMPLES = (
    "Examples:\n\n"
    "outrider bench --concurrency 32 --requests 200\n\n"
    "outrider bench --prompts mine.txt --no-speculation --json    the same server, decoding plainly"
)
"""The end of the help."""

PROMPTS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List ten uses of a paper clip, with a sentence on each.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Summarise the causes of the First World War in one paragraph.",
    "Translate into French: The library opens at nine and closes at six, except on Sundays.",
    "What should one pack for a week of hiking in the mountains?",
    "Compare trains and planes for a journey of 600 kilometres, in a table.",
)
"""What is asked when no file is given, in turn."""
SHARES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class Load:
    """What became of the requests. seconds: from the first request to the last answer."""

    answers: list[Timing] = field(default_factory=list)
    errors: list[OutriderError] = field(default_factory=list)
    seconds: float = 0.0


def bench(
    url: Url = DEFAULT_URL,
    key: Key = None,
    requests: Annotated[int, typer.Option(min=1, help="How many are sent in all.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="How many are under way at once.")] = 8,
    prompts: Annotated[
        Path | None, typer.Option(help="One prompt per line, or .json/.jsonl; default: eight built in.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=10)] = 0.0,
    speculation: Annotated[bool, typer.Option(help="Off: plain decoding.")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Every answer has its most tokens.")] = False,
    raw: Annotated[bool, typer.Option(help="Continue the text itself, without the chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a load on a running server, and say what its clients get: speed, latencies, acceptance, errors.

    Nothing is tried again. Exit code 1 when a request failed.
    """
    from deployments.cli.acceptance import read_texts
    from deployments.client.http_service import HttpService

    texts = read_texts(prompts) if prompts is not None else list(PROMPTS)
    asked: list[Prompt] = [text if raw else [{"role": "user", "content": text}] for text in texts]
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    sampling |= {"speculation": speculation, "ignore_eos": ignore_eos}
    done = asyncio.run(_run(HttpService(url, key), asked, requests, concurrency, sampling))
    if not done.answers:
        raise done.errors[0]
    told = figures(done)
    if as_json:
        typer.echo(json.dumps({"url": url, "concurrency": concurrency, **told}))
    else:
        for line in table(told):
            typer.echo(line)
    if done.errors:
        typer.echo(f"the first error: {done.errors[0]}", err=True)
        raise typer.Exit(1)


async def _run(
    service: HttpService, prompts: Sequence[Prompt], requests: int, concurrency: int, sampling: dict[str, Any]
) -> Load:
    try:
        return await load(service, prompts, requests, concurrency, sampling)
    finally:
        await service.close()


async def load(
    service: Service, prompts: Sequence[Prompt], requests: int, concurrency: int, sampling: dict[str, Any]
) -> Load:
    """Send the prompts in turn, `concurrency` at once, until `requests` were sent; errors are kept, not raised."""
    from deployments.client.request_builder import named, request_for
    from deployments.client.timing import Timing

    done, numbers, started = Load(), iter(range(requests)), time.perf_counter()

    async def worker() -> None:
        for number in numbers:
            request = named(request_for(prompts[number % len(prompts)], {"seed": number, **sampling}))
            timing, sent = Timing(), time.perf_counter()
            try:
                async for delta in service.generate(request):
                    timing.take(delta, time.perf_counter() - sent)
            except OutriderError as error:
                done.errors.append(error)
            else:
                done.answers.append(timing)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, requests)):
            group.create_task(worker())
    done.seconds = time.perf_counter() - started
    return done


def figures(done: Load) -> dict[str, Any]:
    """Figures by name, for machines: times in milliseconds, None where nothing was measured.

    acceptance_length: tokens committed per target pass. acceptance_rate: of the draft tokens that were verified.
    """
    from cluster.observability.quantiles import quantile

    def spread(seconds: list[float]) -> dict[str, float | None]:
        values = {f"p{share * 100:g}": 1e3 * quantile(seconds, share) for share in SHARES}
        return {name: None if math.isnan(value) else round(value, 3) for name, value in values.items()}

    answers = done.answers
    tokens = sum(len(answer.tokens) for answer in answers)
    usages = [answer.usage for answer in answers]
    passes, proposed = sum(one.passes for one in usages), sum(one.proposed_tokens for one in usages)
    return {
        "requests": len(answers) + len(done.errors),
        "errors": dict(Counter(error.code for error in done.errors)),
        "seconds": round(done.seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / done.seconds, 2),
        "first_token_ms": spread([answer.first for answer in answers if answer.tokens]),
        "inter_token_ms": spread([gap for answer in answers for gap in answer.gaps]),
        "request_ms": spread([answer.total for answer in answers if answer.tokens]),
        "acceptance_length": round(tokens / passes, 3) if passes else None,
        "acceptance_rate": round(sum(one.accepted_tokens for one in usages) / proposed, 4) if proposed else None,
    }


def table(told: dict[str, Any]) -> list[str]:
    """The same as lines of text."""
    errors = ", ".join(f"{count} {code}" for code, count in told["errors"].items()) or "none"
    lines = [
        f"{told['requests']} requests in {told['seconds']:.1f} s; errors: {errors}",
        f"tokens/s             {told['tokens_per_s']:.1f} ({told['tokens']} tokens)",
        f"{'':<21}" + "".join(f"{name:>10}" for name in told["first_token_ms"]),
    ]
    for title, name in (
        ("first token", "first_token_ms"),
        ("inter-token", "inter_token_ms"),
        ("request", "request_ms"),
    ):
        cells = (f"{'-' if value is None else format(value, '.1f'):>10}" for value in told[name].values())
        lines.append(f"{title + ', ms':<21}" + "".join(cells))
    length, rate = told["acceptance_length"], told["acceptance_rate"]
    lines.append("acceptance length    " + ("-" if length is None else f"{length:.2f} tokens per target pass"))
    lines.append("acceptance rate      " + ("no draft token was verified" if rate is None else f"{rate:.1%}"))
    return lines
