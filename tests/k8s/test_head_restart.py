"""The head goes and comes back while front pods serve: field case 24, with Ray, Redis and the base's own Serve config.

A head that carries nothing and a node with all the labels of the groups, each in a network namespace as in a pod; what
the Service reaches is the second one's proxy, as the manifest excludes the head.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from built import K8S, ROOT
from namespaces import Namespace, two_namespaces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces, which takes root"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="Redis is not installed"),
]
RAY = (sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts")
HERE = Path(__file__).parent
GCS, REDIS, PASSWORD = 6379, 6399, "secret"


class Pods:
    """The pods of one cluster, and what the operator sets in them."""

    def __init__(self, head: Namespace, node: Namespace, folder: Path) -> None:
        self.head, self.node, self._folder = head, node, folder
        self._log = folder / "log"
        self._environment = {
            "RAY_REDIS_ADDRESS": f"{node.address}:{REDIS}",
            "RAY_external_storage_namespace": "cluster-1",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # the operator's own, with fault tolerance
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "t" * 32,
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONPATH": str(ROOT),
        }

    def start_redis(self) -> None:
        options = (
            "--requirepass",
            PASSWORD,
            "--appendonly",
            "yes",
            "--dir",
            str(self._folder),
            "--protected-mode",
            "no",
        )
        redis = self._start(self.node, "redis-server", "--port", str(REDIS), *options)
        assert redis.stdout is not None
        assert any("Ready to accept connections" in line for line in redis.stdout)

    def start_head(self) -> None:
        self._ray(
            self.head,
            *("--head", f"--port={GCS}", "--num-cpus=0", "--include-dashboard=false"),
            *(f"--redis-password={PASSWORD}", f"--temp-dir={self._folder / 'ray'}"),
        )

    def start_node(self) -> None:
        self._ray(self.node, f"--address={self.head.address}:{GCS}", "--num-cpus=16")

    def deploy(self) -> None:
        manifest = self._folder / "rayservice.yaml"
        # Here one node is all groups.
        text = (K8S / "base" / "rayservice.yaml").read_text()
        for part in ("front", "draft", "target"):
            text = text.replace(f"app.kubernetes.io/component: {part}\n", "app.kubernetes.io/component: all\n")
        manifest.write_text(text)
        deploying = self._python("deploying.py", f"{self.head.address}:{GCS}", str(manifest))
        assert deploying.communicate(timeout=180)[0].strip() == "deployed", self._log.read_text()

    def client(self) -> Popen[str]:
        return self._python("asking.py", f"http://{self.node.address}:8000/v1/completions")

    def _ray(self, where: Namespace, *options: str) -> None:
        labels = "app.kubernetes.io/component=" + ("head" if where is self.head else "all")
        # A head does not start where it sees processes of a cluster at its address: it must not see the node's.
        alone = ("unshare", "--pid", "--fork", "--mount-proc") if where is self.head else ()
        started = self._start(
            where,
            *alone,
            *RAY,
            "start",
            "--block",
            f"--node-ip-address={where.address}",
            f"--labels={labels}",
            *options,
        )
        assert started.stdout is not None
        assert any("Ray runtime started" in line for line in started.stdout), self._log.read_text()

    def _python(self, script: str, *arguments: str) -> Popen[str]:
        return self._start(self.node, sys.executable, "-W", "ignore", str(HERE / script), *arguments)

    def _start(self, where: Namespace, *command: str) -> Popen[str]:
        return where.start(*command, log=self._log, **self._environment)


@pytest.fixture
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = Path("/tmp") / f"outrider-{os.getpid()}"  # Ray's sockets want a short path
    folder.mkdir()
    try:
        with two_namespaces("head", "node") as (head, node):
            yield Pods(head, node, folder)
    finally:
        print((folder / "log").read_text()[-5000:])  # shown when the test fails
        shutil.rmtree(folder, ignore_errors=True)


def test_no_request_fails_while_the_head_is_gone(pods: Pods) -> None:
    """All answers are 200 and the same text: before, while there is no head, and after it has come back."""
    pods.start_redis()
    pods.start_head()
    pods.start_node()
    pods.deploy()
    client = pods.client()
    assert client.stdin is not None
    assert client.stdout is not None

    def answers(count: int) -> list[str]:
        assert client.stdout is not None
        return [client.stdout.readline() for _ in range(count)]

    first = answers(5)
    pods.head.kill()
    during = answers(60)
    pods.start_head()
    after = answers(60)
    client.stdin.close()
    assert first[0].split()[0] == "200"
    assert set(first + during + after) == {first[0]}
    pods.deploy()  # the control plane is back: a new version of the same application is taken
