"""Finds the actors of a tier by their names, so that any number of replicas, and their restarts, are seen."""

from __future__ import annotations

import asyncio

from actors.transport.links import Peer, RayPeer
from actors.transport.socket import SocketPeer

NAMESPACE = "outrider"


def actor_prefix(application: str, tier: str) -> str:
    """What the names of a tier's actors begin with."""
    return f"{application}:{tier}:"


class NamedActors:
    """A Directory over Ray's table of named actors. A restarted replica has a new name, so handles can be kept."""

    def __init__(self, application: str, tier: str) -> None:
        self._prefix = actor_prefix(application, tier)
        self._peers: dict[str, Peer] = {}

    async def members(self) -> dict[str, Peer]:
        """Handles by name. The table is asked in a thread: it is a call to the cluster's control store."""
        gone = await asyncio.to_thread(self._look)
        for peer in gone:
            peer.close()
        return dict(self._peers)

    def _look(self) -> list[Peer]:
        """Bring the peers up to date; returns those that are no members any more."""
        import ray
        from ray.util import list_named_actors

        present = {
            actor["name"]
            for actor in list_named_actors(all_namespaces=True)
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(self._prefix)
        }
        gone = [self._peers.pop(name) for name in self._peers.keys() - present]
        for name in present - self._peers.keys():
            try:
                self._peers[name] = SocketPeer(RayPeer(ray.get_actor(name, namespace=NAMESPACE)))
            except ValueError:  # it died in between
                continue
        return gone
