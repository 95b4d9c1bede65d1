"""Answers as server-sent events: chunks, comments while nothing is said, and errors that come too late for a status."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from actors.errors import OutriderError
from actors.messages import Delta
from deployments.ingress import error_responses
from deployments.ingress.responses import Answer

DONE = b"data: [DONE]\n\n"
PAUSE = b": waiting\n\n"
"""A comment, which clients skip (HTML Living Standard, section 9.2.6)."""


async def events(
    answer: Answer, first: tuple[int, Delta] | None, deltas: AsyncGenerator[tuple[int, Delta] | None, None]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; None among the deltas is a pause."""
    try:
        try:
            yield _events_of(answer, first)
            async for item in deltas:
                written = _events_of(answer, item)
                if written:
                    yield written
            yield _event(answer.usage_chunk()) + DONE
        except Exception as error:
            if not isinstance(error, OutriderError):
                error_responses.logger.error("a stream failed", exc_info=error)
            yield _event([error_responses.error_body(error)]) + DONE
    finally:
        await deltas.aclose()


def _events_of(answer: Answer, item: tuple[int, Delta] | None) -> bytes:
    return PAUSE if item is None else _event(answer.chunks(*item))


def _event(chunks: list[dict[str, object]]) -> bytes:
    """Chunks of one delta as one write."""
    return b"".join(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks)
