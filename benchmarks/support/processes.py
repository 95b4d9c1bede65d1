"""The processes of a running application by what they are, for those who test that killing them loses nothing.

Ray knows the actors by name; a process id is asked of the actor itself, while it still answers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Any, Literal

from cluster.config.serve_names import DRAFT_TIER, INGRESS, ORCHESTRATOR, TARGET_TIER
from deployments.tiers.actor_discovery import NAMESPACE, actor_prefix

Kind = Literal["target actor", "draft actor", "target replica", "draft replica", "orchestrator", "ingress", "proxy"]
"""The proxy is Ray Serve's own, one a node, and serves all applications."""
KINDS: tuple[Kind, ...] = (
    "target actor",
    "draft actor",
    "target replica",
    "draft replica",
    "orchestrator",
    "ingress",
)
"""Those of the application itself."""
_DEPLOYMENTS = {
    "target replica": TARGET_TIER,
    "draft replica": DRAFT_TIER,
    "orchestrator": ORCHESTRATOR,
    "ingress": INGRESS,
}
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class ApplicationProcess:
    """A process of the application, on this machine."""

    kind: Kind
    name: str
    pid: int

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Raises ProcessLookupError when the process has ended."""
        os.kill(self.pid, number)


async def find(application: str, kind: Kind) -> list[ApplicationProcess]:
    """All processes of that kind that answer now, in the order of their names."""
    import ray
    from ray.util import list_named_actors

    if kind in ("target actor", "draft actor"):
        namespace, prefix = NAMESPACE, actor_prefix(application, kind.split()[0])
    elif kind == "proxy":
        namespace, prefix = "serve", "SERVE_PROXY_ACTOR"
    else:
        namespace, prefix = "serve", f"SERVE_REPLICA::{application}#{_DEPLOYMENTS[kind]}#"
    actors = await asyncio.to_thread(list_named_actors, all_namespaces=True)
    names = sorted(a["name"] for a in actors if a["namespace"] == namespace and a["name"].startswith(prefix))

    async def ask(name: str) -> ApplicationProcess | None:
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, namespace)
            return ApplicationProcess(
                kind, name, await asyncio.wait_for(actor.__ray_call__.remote(_process_id), ANSWER_S)
            )
        except Exception:  # on its way up or down
            return None

    return [victim for victim in await asyncio.gather(*(ask(name) for name in names)) if victim is not None]


def _process_id(actor: Any) -> int:
    return os.getpid()
