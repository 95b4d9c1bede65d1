"""What a client reads when the application behind the proxy stops before its response has ended."""

from __future__ import annotations

import json
from pydoc import locate

import openai
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import IngressLostError
from deployments.ingress import lost_ingress
from deployments.ingress.lost_ingress import LostIngressMiddleware
from deployments.runtime import serve_environment

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
FIRST = b'data: {"choices": []}\n\n'


def body(content: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def start(headers: list[tuple[bytes, bytes]], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def says(*messages: Message, error: Exception | None = None, listens: bool = False) -> ASGIApp:
    """An application that sends these and then ends, or fails."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        if listens:
            await receive()
        if error is not None:
            raise error

    return app


async def heard(app: ASGIApp, kind: str = "http") -> list[Message]:
    """What the server is told of one request."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await LostIngressMiddleware(app)({"type": kind, "headers": [(b"x-request-id", b"r1")]}, receive, send)
    return sent


async def test_an_event_stream_that_breaks_off_ends_with_an_error_event() -> None:
    sent = await heard(says(start(EVENTS), body(FIRST, more=True)))
    assert sent[:2] == [start(EVENTS), body(FIRST, more=True)]
    (end,) = sent[2:]
    assert not end.get("more_body", False)
    event, done = end["body"].decode().strip().split("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("ingress_lost", "service_unavailable")
    assert done == "data: [DONE]"


@pytest.mark.parametrize("messages", [(), (start(EVENTS),)])
async def test_a_failure_of_the_application_is_told_and_goes_on_to_the_server(messages: tuple[Message, ...]) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    app = LostIngressMiddleware(says(*messages, error=ConnectionError("gone")))
    with pytest.raises(ConnectionError):
        await app({"type": "http", "headers": []}, receive, send)
    assert sent[0]["status"] == (200 if messages else 503)
    assert b"ingress_lost" in sent[-1]["body"]


async def test_a_response_that_had_not_begun_is_a_503_that_says_when_to_ask_again() -> None:
    head, end = await heard(says())
    assert head["status"] == 503
    headers = dict(head["headers"])
    assert headers[b"retry-after"] == b"1"
    assert headers[b"x-request-id"] == b"r1"
    assert headers[b"content-type"] == b"application/json"
    assert json.loads(end["body"])["error"]["code"] == "ingress_lost"


@pytest.mark.parametrize(
    "messages",
    [
        (start(EVENTS), body(FIRST, more=True), body(b"")),
        (start([], status=503), body(b"busy")),
        (start([(b"content-type", b"application/octet-stream")]), body(b"half a file", more=True)),
    ],
)
async def test_whole_responses_and_broken_files_are_left_as_they_are(messages: tuple[Message, ...]) -> None:
    assert await heard(says(*messages)) == list(messages)


async def test_nothing_is_said_to_a_client_that_is_gone() -> None:
    assert await heard(says(listens=True)) == []
    assert len(await heard(says(start(EVENTS), body(FIRST, more=True), listens=True))) == 2


async def test_other_connections_pass_through() -> None:
    assert await heard(says({"type": "websocket.close"}), kind="websocket") == [{"type": "websocket.close"}]


def test_the_environment_names_the_callback() -> None:
    path = serve_environment.environment()[serve_environment.CALLBACK]
    assert locate(path.replace(":", ".")) is lost_ingress.middlewares
    (one,) = lost_ingress.middlewares()
    assert one.cls is LostIngressMiddleware


async def test_the_official_client_reads_the_code() -> None:
    """The events as bytes on the wire, through the client's own decoder."""
    import httpx

    async def server(request: httpx.Request) -> httpx.Response:
        sent = await heard(says(start(EVENTS), body(FIRST, more=True)))
        return httpx.Response(200, headers=EVENTS, content=b"".join(one["body"] for one in sent[1:]))

    async with openai.AsyncOpenAI(
        base_url="http://x/v1", api_key="none", http_client=httpx.AsyncClient(transport=httpx.MockTransport(server))
    ) as client:
        with pytest.raises(openai.APIError) as caught:
            async for _ in await client.completions.create(model="m", prompt="x", stream=True):
                pass
    assert caught.value.code == IngressLostError.code
