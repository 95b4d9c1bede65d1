"""The exchange: how an engine that schedules itself, in a process of its own, gets proposals from the mailbox.

Once per pass the engine says what the pass decided and is answered with drafts for the next one, over a socket of this
machine. The engine never waits longer than its patience, and a mailbox that is late or lost means no drafts: plain
decoding. What was decided is kept until an answer shows that it has arrived.

Knows nothing of engines. Messages are pickles, read only from who has shown the secret first (multiprocessing's
challenge), as in Ray's own messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

from actors.engines.protocol import Proposal
from actors.messages import VerificationResult

logger = logging.getLogger(__name__)

MOST_UNTOLD = 100_000
"""Results that an engine keeps for a lost mailbox; older ones are dropped (they cost a report, never a token)."""
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PassEnd:
    """One pass of the engine, and whatever an earlier answer did not acknowledge.

    waiting: sequences that can use drafts in the next pass. tokens, rows, seconds: what the pass took.
    overhead: seconds that the exchange of the pass before took.
    """

    number: int
    results: list[VerificationResult]
    waiting: tuple[str, ...]
    tokens: int = 0
    rows: int = 0
    seconds: float = 0.0
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Drafts by sequence, for the pass after `number`.

    quiet: no drafts are to be expected for the sequences that run, so the next pass need not wait to be told so.
    """

    number: int
    proposals: dict[str, Proposal] = field(default_factory=dict)
    quiet: bool = False


class PassAnswerer(Protocol):
    """Who answers passes (target/pass_exchange.py)."""

    @property
    def longest_hold_s(self) -> float: ...

    def answer(self, end: PassEnd) -> Answer: ...


class ProposalServer:
    """The mailbox's end. `answer` is called on a thread of the server, one pass at a time.

    address: (host, port) for an engine that may run on another node; None listens at a socket file of this machine.
    """

    def __init__(self, answer: Callable[[PassEnd], Answer], host: str | None = None) -> None:
        self._answer = answer
        self.secret = os.urandom(32)
        self._folder = tempfile.mkdtemp(prefix="outrider-") if host is None else None
        place: Any = os.path.join(self._folder, "mailbox") if self._folder is not None else (host, 0)
        self._listener = Listener(place, authkey=self.secret)
        self.address: str | tuple[str, int] = self._listener.address
        self._family = socket.AF_UNIX if self._folder is not None else socket.AF_INET
        self._closed = False
        self._connections: set[Connection] = set()
        """Each is closed by the thread that serves it, under the lock: a file number is soon another file's."""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="mailbox-door", daemon=True).start()

    def close(self) -> None:
        """Stop answering; engines go on without drafts."""
        self._closed = True
        with contextlib.suppress(OSError), socket.socket(self._family) as knock:  # accept does not notice a close
            knock.connect(self.address)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception as error:  # closed here, or a caller without the secret
                if not self._closed:
                    logger.warning("a connection to the mailbox was refused: %s", error)
                    time.sleep(0.01)
                continue
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="mailbox", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            while not self._closed:
                connection.send(self._answer(connection.recv()))
        except (EOFError, OSError, ValueError, TypeError):
            pass  # the engine is gone, or this end was closed
        except Exception:
            logger.exception("the mailbox failed; the engine goes on without drafts")
        finally:
            with self._lock:
                self._connections.discard(connection)
                connection.close()


class ProposalClient:
    """The engine's end, used from the thread that runs its passes. Connecting happens on another thread.

    patience_s: longest wait for an answer. An answer that comes later is thrown away, and until it has come nothing
    more is asked, so that a mailbox that stands still costs one wait.
    """

    def __init__(
        self,
        address: str | tuple[str, int],
        secret: bytes,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._secret, self._patience = address, secret, patience_s
        self._clock = clock
        self._connection: Connection | None = None
        self._connecting: threading.Thread | None = None
        self._tried_at = -_RETRY_S
        self._unanswered = 0
        """Results told in a question that is not answered yet, and one; 0 when all are answered."""
        self._quiet = False
        self._untold: list[VerificationResult] = []
        self._number = 0
        self._overhead = 0.0
        self._reach()

    def connected(self, timeout_s: float) -> bool:
        """Wait until there is a connection, at most `timeout_s`."""
        thread = self._connecting
        if thread is not None:
            thread.join(timeout_s)
        return self._connection is not None

    def exchange(
        self,
        results: list[VerificationResult],
        waiting: tuple[str, ...],
        *,
        tokens: int,
        rows: int,
        seconds: float,
        patient: bool = True,
    ) -> dict[str, Proposal]:
        """Tell what was decided and get drafts; empty when the mailbox is late or lost. Never raises.

        patient: wait for an answer also where the last one said that no drafts are to be expected.
        """
        began = self._clock()
        self._number += 1
        self._untold.extend(results)
        del self._untold[:-MOST_UNTOLD]
        connection = self._connection
        if connection is None:
            self._reach()
            return {}
        try:
            if not self._is_free(connection):
                return {}
            message = PassEnd(self._number, list(self._untold), waiting, tokens, rows, seconds, self._overhead)
            connection.send(message)
            self._unanswered = len(self._untold) + 1
            if (self._quiet and not patient) or not connection.poll(self._patience):
                return {}
            return self._receive(connection).proposals
        except (EOFError, OSError, ValueError) as error:
            logger.warning("the mailbox is lost, decoding goes on without drafts: %s", error or type(error).__name__)
            self._drop()
            return {}
        finally:
            self._overhead = self._clock() - began

    def close(self) -> None:
        """Drop the connection."""
        self._drop()

    def _is_free(self, connection: Connection) -> bool:
        """Has the answer to the last question come? Drafts in a late one are of no use any more."""
        if self._unanswered and connection.poll(0):
            self._receive(connection)
        return not self._unanswered

    def _receive(self, connection: Connection) -> Answer:
        answer: Answer = connection.recv()
        del self._untold[: self._unanswered - 1]
        self._unanswered, self._quiet = 0, answer.quiet
        return answer

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._unanswered, self._quiet = None, 0, False

    def _reach(self) -> None:
        if self._connecting is not None or self._clock() - self._tried_at < _RETRY_S:
            return
        self._tried_at = self._clock()
        self._connecting = threading.Thread(target=self._connect, name="mailbox-link", daemon=True)
        self._connecting.start()

    def _connect(self) -> None:
        try:
            connection = Client(self._address, authkey=self._secret)
        except (OSError, EOFError, AuthenticationError) as error:
            logger.warning("no connection to the mailbox at %s: %s", self._address, error)
        else:
            self._unanswered = 0
            self._connection = connection
        finally:
            self._connecting = None
