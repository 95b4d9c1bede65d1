"""`outrider generate` and `outrider chat`: answers in a terminal, streamed as they are written."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.options import AsJson, Key, Url, client_of
from deployments.client.address import DEFAULT_URL

EXAMPLES = (
    "Examples:\n\n"
    'outrider generate "Why is the sky blue?" --explain\n\n'
    "cat prompt.txt | outrider generate - --raw --temperature 0 --json"
)
"""The end of the help of `generate`."""


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)],
    url: Url = DEFAULT_URL,
    key: Key = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=10)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=-1)] = 0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text itself, without the chat template.")] = False,
    speculation: Annotated[bool, typer.Option(help="Off: plain decoding.")] = True,
    explain: Annotated[bool, typer.Option(help="Colour each token by where it came from.")] = False,
    picture: Annotated[
        Path | None, typer.Option("--svg", help="Write a moving picture of the tokens' arrival here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streamed as it is written."""
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "system", "content": system}] if system else []
    asked: Any = text if raw else [*messages, {"role": "user", "content": text}]
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling |= {"stop": tuple(stop or ()), "speculation": speculation}
    if seed is not None:
        sampling["seed"] = seed
    with client_of(url, key) as client:
        if as_json:
            result = client.generate([asked], progress=False, errors="raise", **sampling)[0]
            typer.echo(json.dumps(result.as_json(), ensure_ascii=False))
            return
        _stream(client, asked, sampling, explain, picture)


def chat(
    url: Url = DEFAULT_URL,
    key: Key = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=10)] = 0.7,
    explain: Annotated[bool, typer.Option(help="Colour each token by where it came from.")] = False,
) -> None:
    """Talk to the model. An empty line or Ctrl-D ends."""
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    with client_of(url, key) as client:
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                line = ""
            if not line:
                return
            messages.append({"role": "user", "content": line})
            answer = _stream(client, messages, {"max_tokens": max_tokens, "temperature": temperature}, explain)
            messages.append({"role": "assistant", "content": answer})


def _stream(client: Any, asked: Any, sampling: dict[str, Any], explain: bool, picture: Path | None = None) -> str:
    from rich.console import Console

    from deployments.cli.explain import Explainer, describe
    from deployments.cli.token_picture import Arrival, svg

    console = Console()
    explainer = Explainer(console, explain)
    answer, usage = "", None
    began: float | None = None
    arrivals: list[Arrival] = []
    for delta in client.stream(asked, **sampling):
        now = time.monotonic()
        began = now if began is None else began
        arrivals.append(Arrival(now - began, delta.texts, delta.origins))
        explainer.show(delta)
        answer += delta.text
        usage = delta.usage or usage
    console.print()
    if explain and usage is not None:
        explainer.legend()
        explainer.summary(usage)
    if picture is not None:
        picture.write_text(svg(arrivals, describe(usage) if usage is not None else answer), encoding="utf-8")
        console.print(f"written: {picture}")
    return answer
