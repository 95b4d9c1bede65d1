"""What clients see of a node that dies, or stands still, under a checked load.

A quarter of the clients enters by the proxy of each node, so that nodes call replicas on others. Those that enter by
the node that is lost are looked at by themselves, because their own connection leads there; and so is who may be
answered by an ingress replica on it: Serve's proxies prefer the one of their own node, and nodes with models have none.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from actors.errors import IngressLostError, UnavailableError
from actors.messages import Delta, GenerationRequest
from benchmarks.support import emulated_application
from benchmarks.support.checked_load import CheckedLoad, Told, longest
from benchmarks.support.fault_scenarios import Say, sizes
from benchmarks.support.fault_schedule import How
from benchmarks.support.processes import KINDS, find
from benchmarks.support.ray_nodes import Node, Nodes, Pool
from cluster.config.deployment import DeploymentConfig
from deployments.client.http_service import HttpService

STRIKES: tuple[tuple[How, Pool], ...] = (
    ("kill", "models"),
    ("freeze", "models"),
    ("kill", "front"),
    ("freeze", "front"),
)
SEEN_S = 8.0
"""How long after a node was struck pauses are taken for its doing, until those that are under way then have ended."""
LIMIT_S = 120.0


class Doors:
    """A Service over the proxies of several nodes: the first one, until it refuses; then the next."""

    def __init__(self, urls: list[str]) -> None:
        self._order = tuple(HttpService(url) for url in urls)
        self._doors = list(self._order)
        self.lost = 0
        """Answers that ended with the word that their ingress replica was lost."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """One answer, of the door that is first now. Raises like HttpService."""
        door = self._doors[0]
        try:
            async for delta in door.generate(request):
                yield delta
        except UnavailableError as error:
            self.lost += isinstance(error, IngressLostError)
            if door is self._doors[0]:
                self._doors.append(self._doors.pop(0))
            raise

    async def status(self) -> dict[str, object]:
        """As the first door's."""
        return await self._doors[0].status()

    async def ready(self) -> bool:
        """As the first door's."""
        return await self._doors[0].ready()

    async def restored(self) -> bool:
        """Go back to the first order, when all of them are there. Returns whether they are."""
        if all(await asyncio.gather(*(door.ready() for door in self._order))):
            self._doors = list(self._order)
            return True
        return False

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await asyncio.gather(*(door.close() for door in self._doors))


@dataclass
class Loss:
    """What one node's loss did. Seconds."""

    how: How
    pool: Pool
    held: list[str]
    """What ran there."""
    pause: float
    """Longest within any stream that neither enters by the lost node nor is answered by an ingress replica on it."""
    wait: float
    """Longest of theirs for a first token."""
    ended: int
    """Of theirs that ended with an error."""
    own: float
    """Longest silence of any other stream, before it ended with an error or went on."""


@dataclass
class Losses:
    """All of them, and what clients saw in all."""

    losses: list[Loss] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    ingress_lost: int = 0
    """Answers that ended with the error of that code."""


def config(name: str, port: int, streams: int) -> DeploymentConfig:
    """Two of everything, in the pools."""
    models, front = {"labels": {"pool": "models"}}, {"labels": {"pool": "front"}}
    return emulated_application.config(
        name,
        port,
        streams,
        target={"resources": models},
        draft={"resources": models},
        orchestrator=models,
        ingress=front,
    )


class Drill:
    """Strikes nodes of a running application, each when everything has recovered from the one before.

    url: of the head's proxy, which is never lost.
    """

    def __init__(self, url: str, config: DeploymentConfig, nodes: Nodes, streams: int, say: Say) -> None:
        self._config = config
        self._nodes = nodes
        self._say = say
        self._streams = streams
        self._control = HttpService(url)
        root = url.rpartition(":")[0]
        urls = [f"{root}:{port}{config.ingress.route_prefix}" for port in nodes.ports]
        self._doors = {port: Doors(urls[i:] + urls[:i]) for i, port in enumerate(nodes.ports)}
        self._loads: dict[int, CheckedLoad] = {}

    async def run(self, repeats: int) -> Losses:
        """All strikes, so many times; then see that nothing is held."""
        found, numbers = Losses(), itertools.count()

        def request(_: int) -> GenerationRequest:
            return emulated_application.request(next(numbers))

        each = self._streams // len(self._doors)
        self._loads = {
            port: CheckedLoad(it, request, emulated_application.truth, each) for port, it in self._doors.items()
        }
        await self._whole()
        for _ in range(repeats):
            for how, pool in STRIKES:
                found.losses.append(await self._lose(how, self._nodes.pools[pool][-1]))
                await self._whole()
        found.told = [await load.stop() for load in self._loads.values()]
        found.ingress_lost = sum(doors.lost for doors in self._doors.values())
        await emulated_application.at_rest(self._config.name)
        for service in (*self._doors.values(), self._control):
            await service.close()
        return found

    async def _lose(self, how: How, node: Node) -> Loss:
        """Strike a node, and look until every stream that has nothing to do with it has gone on."""
        pids = {process.pid for process in node.processes()}
        running = [one for kind in KINDS for one in await find(self._config.name, kind)]
        held = sorted(str(one.kind) for one in running if one.pid in pids)
        entries = (
            {node.port} if node.pool == "models" else {node.port, *(one.port for one in self._nodes.pools["models"])}
        )
        own = [load.told for port, load in self._loads.items() if port in entries]
        others = [load.told for port, load in self._loads.items() if port not in entries]
        before = sum(len(told.breaks) for told in others)
        struck = time.monotonic()
        node.kill() if how == "kill" else node.freeze()
        await asyncio.sleep(SEEN_S)
        await emulated_application.until(functools.partial(_gone_on, others, time.monotonic()), LIMIT_S)
        now = time.monotonic()
        pause = max(longest(told.gaps, struck, now) for told in others)
        wait = max(longest(told.waits, struck, now) for told in others)
        ended = sum(len(told.breaks) for told in others) - before
        if how == "kill":
            self._nodes.replace(node)  # Ray starts nodes from the main thread alone, so that all clients stand still
        else:
            node.thaw()
        await emulated_application.until(functools.partial(_gone_on, own, time.monotonic()), LIMIT_S)
        begun = struck + SEEN_S / 2  # a silence that began later is the new node's, for which all clients stood still
        silence = max(longest([*told.breaks, *told.gaps, *told.waits], struck, begun) for told in own)
        loss = Loss(how, node.pool, held, pause, wait, ended, silence)
        self._say(f"{how} a node with {', '.join(held)}: {loss}")
        return loss

    async def _whole(self) -> None:
        """Two of everything are there and take sequences, and all clients are answered again."""
        await emulated_application.until(self._complete, LIMIT_S)
        for doors in self._doors.values():
            await emulated_application.until(doors.restored, LIMIT_S)
        told = [load.told for load in self._loads.values()]
        enough = [one.answers + len(one.under_way) for one in told]
        await emulated_application.until(
            lambda: all(one.answers >= some for one, some in zip(told, enough, strict=True)), LIMIT_S
        )

    async def _complete(self) -> bool:
        counts = [len(await find(self._config.name, kind)) for kind in KINDS]
        return min(counts) >= 2 and await sizes(self._control) == (2, 2)


def _gone_on(told: list[Told], since: float) -> bool:
    """Every request has given a sign since then, or has been made since then."""
    return all(sign >= since for one in told for sign in one.under_way.values())
