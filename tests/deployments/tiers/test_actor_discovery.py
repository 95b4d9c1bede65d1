"""A tier's members by the names of their actors; the peers of those that are gone are closed."""

from __future__ import annotations

from typing import Any

import pytest

from actors.transport.socket import SocketPeer
from deployments.tiers.actor_discovery import NAMESPACE, NamedActors


async def test_the_peer_of_a_replica_that_is_gone_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["app:target:a", "app:target:b", "app:draft:c", "other:target:d"]
    closed: list[str] = []

    def table(all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": NAMESPACE} for name in names]

    def close(peer: SocketPeer, link: str | None = None) -> None:
        closed.append(next(name for name, known in members.items() if known is peer))

    def get_actor(name: str, namespace: str) -> Any:
        if name == "app:target:b" and namespace == NAMESPACE:
            raise ValueError("it died in between")
        return object()

    monkeypatch.setattr("ray.util.list_named_actors", table)
    monkeypatch.setattr("ray.get_actor", get_actor)
    monkeypatch.setattr(SocketPeer, "close", close)
    directory = NamedActors("app", "target")
    members = await directory.members()
    assert list(members) == ["app:target:a"]
    assert (await directory.members())["app:target:a"] is members["app:target:a"]
    assert closed == []
    names.remove("app:target:a")
    assert await directory.members() == {}
    assert closed == ["app:target:a"]
