"""The exchange between an engine and the mailbox: late, lost and repeated messages cost drafts, never an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from actors.engines.protocol import Proposal
from actors.engines.vllm.ipc import Answer, PassEnd, ProposalClient, ProposalServer
from actors.messages import VerificationResult

PATIENCE_S = 5.0
DRAFTS = {"a": Proposal((1, 2), (0.9, 0.8))}


class Mailbox:
    """Answers every pass with the same drafts, once it may."""

    def __init__(self) -> None:
        self.heard: list[PassEnd] = []
        self.quiet = False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answered = threading.Semaphore(0)

    def answer(self, end: PassEnd) -> Answer:
        self.heard.append(end)
        self.may_answer.wait(30)
        self.answered.release()
        return Answer(end.number, {} if self.quiet else DRAFTS, self.quiet)


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
def server(mailbox: Mailbox) -> Iterator[ProposalServer]:
    server = ProposalServer(mailbox.answer)
    yield server
    mailbox.may_answer.set()
    server.close()


def decided(position: int) -> VerificationResult:
    return VerificationResult("a", position, (7,))


def ask(client: ProposalClient, position: int, *, patient: bool = True) -> dict[str, Proposal]:
    return client.exchange([decided(position)], ("a",), tokens=1, rows=1, seconds=0.01, patient=patient)


def test_a_pass_is_told_and_answered(mailbox: Mailbox, server: ProposalServer) -> None:
    client = ProposalClient(server.address, server.secret, PATIENCE_S)
    assert client.connected(PATIENCE_S)
    assert ask(client, 4) == DRAFTS
    assert ask(client, 5) == DRAFTS
    assert [end.results for end in mailbox.heard] == [[decided(4)], [decided(5)]]
    assert mailbox.heard[1].overhead > 0  # what the first exchange took
    client.close()


def test_nobody_is_heard_without_the_secret(mailbox: Mailbox, server: ProposalServer) -> None:
    stranger = ProposalClient(server.address, b"x" * 32, PATIENCE_S)
    assert not stranger.connected(PATIENCE_S)
    assert ask(stranger, 4) == {}
    client = ProposalClient(server.address, server.secret, PATIENCE_S)  # the door is still open for others
    assert client.connected(PATIENCE_S)
    assert ask(client, 4) == DRAFTS
    assert len(mailbox.heard) == 1


def test_a_late_answer_is_thrown_away_and_nothing_is_asked_before_it(mailbox: Mailbox, server: ProposalServer) -> None:
    client = ProposalClient(server.address, server.secret, patience_s=0.0)
    assert client.connected(PATIENCE_S)
    mailbox.may_answer.clear()
    assert ask(client, 4) == {}
    assert ask(client, 5) == {}  # still waiting for the first
    assert len(mailbox.heard) <= 1
    mailbox.may_answer.set()
    assert mailbox.answered.acquire(timeout=30)
    patient = ProposalClient(server.address, server.secret, PATIENCE_S)
    assert patient.connected(PATIENCE_S)
    assert ask(patient, 6) == DRAFTS  # another engine is not kept from asking
    position = 6
    while len(mailbox.heard) < 3:  # the late answer may still be on its way
        ask(client, position)
        position += 1
    assert mailbox.heard[2].results[:2] == [decided(5), decided(6)]  # the late answer said that 4 had arrived


def test_a_quiet_mailbox_is_told_and_not_waited_for(mailbox: Mailbox, server: ProposalServer) -> None:
    client = ProposalClient(server.address, server.secret, PATIENCE_S)
    assert client.connected(PATIENCE_S)
    mailbox.quiet = True
    assert ask(client, 4) == {}
    mailbox.may_answer.clear()
    assert ask(client, 5, patient=False) == {}  # comes back although nobody answers
    mailbox.quiet = False
    mailbox.may_answer.set()
    while not (drafts := ask(client, 6)):  # until the answer to 5 has come, nothing more is asked
        pass
    assert drafts == DRAFTS
    assert [d.position for end in mailbox.heard for d in end.results][:3] == [4, 5, 6]


def test_a_lost_mailbox_means_no_drafts_and_is_found_again(mailbox: Mailbox, server: ProposalServer) -> None:
    now = [0.0]
    client = ProposalClient(server.address, server.secret, PATIENCE_S, lambda: now[0])
    assert client.connected(PATIENCE_S)
    client.close()  # the connection breaks
    assert ask(client, 4) == {}
    now[0] += 2.0  # time to try again
    assert ask(client, 5) == {}
    assert client.connected(PATIENCE_S)
    assert ask(client, 6) == DRAFTS
    assert mailbox.heard[-1].results == [decided(4), decided(5), decided(6)]
    server.close()
    assert ask(client, 7) == {}
    assert ask(client, 8) == {}
