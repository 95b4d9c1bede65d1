"""Links between two ends in one process: what waits is bounded, nothing that was published is lost, what carries a
dropped link is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.engines.protocol import ModelCard
from actors.errors import EngineError
from actors.messages import CommitUpdate, Expansion, ProposalBatch, Pulse, VerificationBatch
from actors.transport import links
from actors.transport.backlog import MOST_OFFERS, Backlog
from actors.transport.connection import Connection
from actors.transport.links import LinkTable, Outbox


def offer(position: int, *sequences: str, **more: Any) -> ProposalBatch:
    return ProposalBatch("draft", {name: [Expansion(1, position, (2,), (0.5,))] for name in sequences}, **more)


def results(number: int) -> VerificationBatch:
    return VerificationBatch("target", number, [])


def test_of_many_offers_the_newest_of_each_sequence_wait_and_nothing_else_is_dropped() -> None:
    backlog: Backlog[Any] = Backlog(most=10)
    commits = [CommitUpdate("a", position, (1,)) for position in range(5)]
    for commit in commits:
        assert backlog.put(commit)
    assert backlog.put(offer(0, "a", "b", behind={"a": 3}, unknown=("x",)))
    for position in range(1, 1000):
        assert backlog.put(offer(position, "a", refused=("y",)))
        assert len(backlog) <= len(commits) + MOST_OFFERS
    items = backlog.take()
    assert [item for item in items if isinstance(item, CommitUpdate)] == commits
    offers = [item for item in items if isinstance(item, ProposalBatch)]
    assert [o.expansions["b"][0].position for o in offers if "b" in o.expansions] == [0]
    assert [o.expansions["a"][0].position for o in offers] == sorted(o.expansions["a"][0].position for o in offers)
    assert offers[-1].expansions["a"][0].position == 999
    assert {name for o in offers for name in (*o.unknown, *o.refused, *o.behind)} == {"x", "y", "a"}
    assert len(backlog) == 0


def test_what_may_not_be_dropped_is_refused_beyond_the_bound() -> None:
    backlog: Backlog[Any] = Backlog(most=2)
    assert [backlog.put(results(number)) for number in range(3)] == [True, True, False]
    assert backlog.put(offer(0, "a"))  # offers have a bound of their own
    assert [type(item) for item in backlog.take()] == [VerificationBatch, VerificationBatch, ProposalBatch]
    assert backlog.put(results(3))


async def turn() -> None:
    """What was called soon has been done."""
    await asyncio.sleep(0)


async def test_results_published_before_a_stream_opens_wait_for_it() -> None:
    table: LinkTable[int] = LinkTable(asyncio.get_running_loop(), lambda: 0.0)
    table.meet("a")
    table.publish({"a": 1, "stranger": 5})
    table.publish({"a": 2})
    await turn()
    stream = table.stream("a")
    assert await anext(stream) == [1, 2]
    table.publish({"a": 3})
    assert await anext(stream) == [3]
    assert [items async for items in table.stream("stranger")] == []


async def test_a_reader_that_does_not_read_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_RESULTS", 3)
    table: LinkTable[Any] = LinkTable(asyncio.get_running_loop(), lambda: 0.0)
    for name in ("slow", "quick"):
        table.meet(name)
    slow, quick = table.stream("slow"), table.stream("quick")
    for number in range(4):
        table.publish({"slow": results(number), "quick": results(number)})
        assert [item.number for item in await anext(quick)] == [number]
        if number == 0:
            assert [item.number for item in await anext(slow)] == [0]
    assert table.touch("slow")  # three wait, which is not too much
    table.publish({"slow": results(4)})
    await turn()
    assert not table.touch("slow")
    assert table.expired(1.0) == ["slow"]  # so what its sequences hold is given back
    assert table.expired(1.0) == []
    assert table.touch("quick")


async def test_mail_that_is_not_taken_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_MAIL", 3)
    failures: list[BaseException] = []
    outbox: Outbox[int] = Outbox(lambda items: asyncio.sleep(3600), failures.append)
    outbox.start()
    for item in range(4):  # four calls may be under way
        outbox.post(item)
        await turn()
        await turn()
    for item in range(4):
        outbox.post(item)
    assert len(failures) == 1
    assert isinstance(failures[0], EngineError)
    await outbox.close()


class Carrier:
    """A peer that answers, and notes what was given back."""

    def __init__(self) -> None:
        self.closed: list[str | None] = []
        self.ending = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        return {"meet": Pulse(False, 0), "pulse": Pulse(False, 0), "card": ModelCard("m", 9, 8, 1)}.get(method)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        await self.ending.wait()
        yield []

    def close(self, link: str | None = None) -> None:
        self.closed.append(link)


class Listener:
    """Nothing is expected to happen."""

    def __init__(self) -> None:
        self.lost: list[BaseException] = []

    def on_results(self, connection: Any, results: list[Any]) -> None: ...

    def on_draining(self, connection: Any) -> None: ...

    def on_lost(self, connection: Any, error: BaseException) -> None:
        self.lost.append(error)


async def test_a_connection_that_is_closed_gives_back_what_carried_it() -> None:
    peer, listener = Carrier(), Listener()
    connection: Connection[Any, Any] = Connection(
        "r", link="o/1", peer=peer, stall_timeout_s=5.0, clock=lambda: 0.0, listener=listener
    )
    await connection.start()
    assert peer.closed == []
    await connection.close()
    assert (peer.closed, listener.lost) == (["o/1"], [])
