"""Request bodies that arrive packed (Content-Encoding), unpacked piece by piece. Knows no HTTP beyond that header."""

from __future__ import annotations

import zlib

from actors.errors import RequestError
from deployments.ingress.error_responses import MediaTypeError
from deployments.ingress.request_body import MalformedError

ACCEPTED = "gzip, identity"
_GZIP_WINDOW = 31
"""zlib's number for: a gzip header, and the largest window."""


def unpacker(encoding: str) -> Unpacker | None:
    """For a Content-Encoding; None if the body is not packed. Raises MediaTypeError for other packings."""
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return Unpacker()
    error = MediaTypeError(f"bodies are read plain or as gzip, not as {encoding.strip()}")
    error.accept_encoding = ACCEPTED
    raise error


class Unpacker:
    """One gzip stream, which may have several members (RFC 1952, section 2.2)."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP_WINDOW)

    def feed(self, data: bytes, limit: int) -> bytes:
        """What `data` unpacks to; at most `limit` + 1 bytes are made of it, so that more than `limit` can be told.

        Raises MalformedError.
        """
        unpacked = bytearray()
        try:
            while data and len(unpacked) <= limit:
                if self._member.eof:
                    self._member = zlib.decompressobj(_GZIP_WINDOW)
                unpacked += self._member.decompress(data, limit + 1 - len(unpacked))
                data = self._member.unused_data
        except zlib.error as error:
            raise _broken(str(error)) from error
        return bytes(unpacked)

    def finish(self) -> None:
        """The body has ended. Raises MalformedError if the stream has not."""
        if not self._member.eof:
            raise _broken("it is cut off")


def _broken(why: str) -> RequestError:
    return MalformedError(f"the body is not gzip: {why}")
