"""`outrider batch`: an OpenAI Batch file through a server, resumable."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.errors import UnavailableError
from deployments.cli.options import Key, Url
from deployments.client.address import DEFAULT_URL
from deployments.client.retrying import Retries

if TYPE_CHECKING:
    import httpx

    from deployments.client.batch_file import Counts, Post

ATTEMPTS = 8
"""Tries of one item before it counts as failed; the pauses between them grow to twenty seconds."""
EXAMPLES = (
    "A line of IN:\n\n"
    '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "One is", "max_tokens": 9}}\n\n'
    "Examples:\n\n"
    "outrider batch requests.jsonl answers.jsonl\n\n"
    "outrider batch requests.jsonl answers.jsonl --url https://outrider.example --concurrency 256"
)
"""The end of the command's help."""


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one a line, as OpenAI's Batch API has them.")],
    results: Annotated[
        Path, typer.Argument(metavar="OUT", help="Answers; what is in there already is not asked again.")
    ],
    errors: Annotated[Path | None, typer.Option(help="Failed items and damaged lines. Default: OUT.errors.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="The counts at the end, for machines.")] = False,
) -> None:
    """Answer every request of a file. Stop it at any moment: the same command goes on where it was.

    Exit code 1 when an item failed; --errors tells which, and why.
    """
    counts = asyncio.run(
        _run(source, results, errors or results.with_name(results.name + ".errors"), url, key, concurrency)
    )
    if as_json:
        typer.echo(json.dumps(asdict(counts)))
    typer.echo(
        f"{counts.completed} answered, {counts.failed} failed, of {counts.total} ({counts.resumed} by an earlier run)",
        err=True,
    )
    raise typer.Exit(1 if counts.failed else 0)


async def _run(source: Path, results: Path, errors: Path, url: str, key: str | None, concurrency: int) -> Counts:
    import httpx

    from deployments.client.batch_file import Batch
    from deployments.client.http_connection import connection
    from deployments.client.http_service import CONNECT_LIMIT_S
    from deployments.client.progress import progress_for
    from deployments.client.results import Result, usage_from

    timeout = httpx.Timeout(None, connect=CONNECT_LIMIT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    bar = progress_for(_lines(source), None)

    def report(ok: bool, body: dict[str, Any]) -> None:
        error = None if ok else UnavailableError("failed")
        bar.add(Result(0, usage=usage_from(body.get("usage") or {}), error=error))

    try:
        async with connection(url, key, timeout=timeout, limits=limits) as http:
            return await Batch(source, results, errors, _posting(http), concurrency, report).run()
    finally:
        bar.close()


class _PassingError(Exception):
    """An answer that says that another attempt may succeed."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.status_code)
        self.response = response
        pause = response.headers.get("retry-after", "")
        self.retry_after = float(pause) if pause.isdecimal() else 0.0


def _posting(http: httpx.AsyncClient) -> Post:
    import httpx as client

    from deployments.client.batch_file import PASSING_STATUSES

    async def post(route: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        async def attempt() -> httpx.Response:
            response = await http.post(route, json=body)
            if response.status_code in PASSING_STATUSES:
                raise _PassingError(response)
            return response

        try:
            response = await Retries(ATTEMPTS - 1).run(attempt, (_PassingError, client.HTTPError))
        except _PassingError as error:
            response = error.response
        except client.HTTPError as error:
            raise UnavailableError(f"{http.base_url} cannot be reached: {error}") from error
        return response.status_code, response.headers.get("x-request-id", ""), _json(response)

    return post


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        told = response.json()
    except ValueError:
        told = None
    if isinstance(told, dict):
        return told
    return {"error": {"message": response.text[:200], "type": "server_error", "param": None, "code": None}}


def _lines(path: Path) -> int:
    """How many there are, for the progress bar; a file that cannot be read is reported later."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError:
        return 0
