"""Ray nodes on one machine that can be lost whole: a node is a raylet and everything that it started.

A node's death ends all of that at the same instant. A node that vanishes, as one does whose power or network goes, is
one whose processes all stand still: no connection to them is closed, and nothing is refused.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import psutil

from deployments.runtime import serve_environment
from deployments.runtime.local import ALLOCATOR, OBJECT_STORE_BYTES, exported, free_port

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

Pool = Literal["models", "front"]
"""What a node is for: a target, a draft and an orchestrator; or an ingress replica."""
WORKER_PORT = "RAY_SERVE_WORKER_PROXY_HTTP_PORT"
"""Serve's variable for the port of a node's proxy: nodes of one machine would share one, and with it their clients."""
# Room for one of each: what a lost node held waits for the next node, and does not crowd onto the one that is left.
# A byte of memory is what orchestrators and ingress replicas take.
ROOM: dict[Pool, dict[str, int]] = {"models": {"num_cpus": 2, "memory": 1}, "front": {"num_cpus": 0, "memory": 1}}


class Node:
    """One node. `port` is its proxy's, if it has one."""

    def __init__(self, cluster: Cluster, pool: Pool, port: int) -> None:
        self.pool = pool
        self.port = port
        self._cluster = cluster
        options = {"labels": {"pool": pool}, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        with exported({WORKER_PORT: str(port)}):
            self._node: Any = cluster.add_node(**ROOM[pool], **options)
        self._struck: list[psutil.Process] = []

    def processes(self) -> list[psutil.Process]:
        """Its raylet, and all that it started."""
        raylet = psutil.Process(self._node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let what is left of it go on."""
        for process in self._struck:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def remove(self) -> None:
        """Take one that was killed off the cluster's list."""
        self._cluster.remove_node(self._node, allow_graceful=False)

    def _signal(self, number: signal.Signals) -> None:
        self._struck = self.processes()
        for process in self._struck:
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker that ended by itself meanwhile
                process.send_signal(number)


class Nodes:
    """A head with Ray's control store, Serve's controller and a proxy, and two nodes of each pool."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.pools: dict[Pool, list[Node]] = {
            pool: [Node(cluster, pool, free_port()) for _ in range(2)] for pool in ROOM
        }

    @property
    def ports(self) -> list[int]:
        """Of all nodes' proxies."""
        return [node.port for pool in self.pools.values() for node in pool]

    def replace(self, lost: Node) -> None:
        """Another node for one that was killed, with its port."""
        lost.remove()
        pool = self.pools[lost.pool]
        pool[pool.index(lost)] = Node(self._cluster, lost.pool, lost.port)


@contextlib.contextmanager
def cluster_of_nodes() -> Iterator[Nodes]:
    """A head and four nodes, to which this process is connected; they end with the context."""
    import ray
    from ray.cluster_utils import Cluster

    variables = ALLOCATOR | serve_environment.environment() | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with exported(variables):
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield Nodes(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()
