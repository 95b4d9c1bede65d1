"""`outrider generate` and `outrider chat`: answers in a terminal, streamed as they are written."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.errors import RequestError
from deployments.cli.options import AsJson, Key, Temperature, Url, client_of, said
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
    temperature: Temperature = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option(min=-1)] = None,
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
    _take_any_byte()
    text = _checked(sys.stdin.read() if prompt == "-" else prompt)
    messages = [{"role": "system", "content": _checked(system)}] if system else []
    asked: Any = text if raw else [*messages, {"role": "user", "content": text}]
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "stop": tuple(stop or ()), "speculation": speculation}
    sampling |= said(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
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
    temperature: Temperature = None,
    explain: Annotated[bool, typer.Option(help="Colour each token by where it came from.")] = False,
) -> None:
    """Talk to the model. An empty line or Ctrl-D ends. Exit code 1 when a line was refused."""
    messages: list[dict[str, object]] = [{"role": "system", "content": _checked(system)}] if system else []
    failed = False
    _take_any_byte()
    with client_of(url, key) as client:
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                line = ""
            if not line:
                raise typer.Exit(1 if failed else 0)
            messages.append({"role": "user", "content": line})
            try:
                _checked(line)
                answer = _stream(client, messages, {"max_tokens": max_tokens, **said(temperature=temperature)}, explain)
            except RequestError as error:  # of this line only: the conversation goes on without it
                _refuse(error)
                failed = True
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


def _take_any_byte() -> None:
    """Read what is no UTF-8 as Python reads arguments, so that one bad byte costs no other line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _checked(text: str) -> str:
    """Raises RequestError for bytes that are no UTF-8, as the terminal or a pipe sent them."""
    wrong = next((letter for letter in text if "\udc80" <= letter <= "\udcff"), None)
    if wrong is not None:
        raise RequestError(f"this is not UTF-8: it has the byte 0x{ord(wrong) - 0xDC00:02X}", "prompt")
    return text


def _refuse(error: RequestError) -> None:
    print(f"outrider: {error}", file=sys.stderr)


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
