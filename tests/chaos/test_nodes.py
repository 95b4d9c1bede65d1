"""Several nodes: they die and stand still, the network between two is cut, the head restarts. Slow: a cluster each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.support.processes import KINDS
from deployments.runtime import serve_environment

pytestmark = [pytest.mark.ray, pytest.mark.slow]
HERE = Path(__file__).parent
NEAR, FAR = "outrider-near", "outrider-far"
ENVIRONMENT = serve_environment.environment() | {
    "PYTHONPATH": os.pathsep.join((str(HERE.parent.parent), str(HERE))),
    "RAY_AUTH_MODE": "disabled",  # `ray start` asks for a token otherwise; these networks have no strangers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}
HEAD, WORKER = "10.77.0.1", "10.77.0.2"
ADDRESS = f"{HEAD}:6399"
AS_HEAD = ("--head", "--node-ip-address", HEAD, "--port", "6399", "--include-dashboard", "false")
AS_WORKER = ("--address", ADDRESS, "--node-ip-address", WORKER, "--labels", "side=far")


def run_drill(name: str, *arguments: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """Run a drill, and return its verdict; `before` is put before its command."""
    command = [*before, sys.executable, str(HERE / f"{name}.py"), *arguments]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=420, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("VERDICT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    print(lines[0])
    verdict: dict[str, Any] = json.loads(lines[0].removeprefix("VERDICT "))
    assert (verdict["lost"], verdict["changed"]) == ([], [])
    # A connection breaks with the ingress replica that it led to, and with nothing else.
    assert [one for one in verdict["broken"] if "orchestrator" in one] == []
    return verdict


def test_a_node_that_dies_or_stands_still_takes_no_stream_with_it() -> None:
    """But those whose own connection leads there: they end with an error, and are asked for again."""
    facts = run_drill("drill_nodes")["facts"]
    assert not facts["on_head"]
    # Two replicas of everything on two nodes each: a node takes one of each with it, and never both.
    models = sorted(set(KINDS) - {"ingress"})
    assert [(what, held) for what, held, _ in facts["losses"]] == [
        ("kill models", models),
        ("freeze models", models),
        ("kill front", ["ingress"]),
        ("freeze front", ["ingress"]),
    ]
    assert [ended for _, _, ended in facts["losses"]] == [0, 0, 0, 0]


def test_what_a_dead_node_held_comes_back_on_the_one_that_is_left() -> None:
    facts = run_drill("drill_one_left")["facts"]
    # Two replicas of a tier on two nodes with the same label: one on each, none on the head.
    assert facts["spread"] == {"target": [1, 1], "draft": [1, 1]}
    assert not facts["on_head"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_namespaces() -> Iterator[None]:
    """Two network namespaces with one link between them; 10.77.0.1 is near, 10.77.0.2 is far."""
    with ExitStack() as undo:
        for name in (NEAR, FAR):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "near0", "netns", NEAR, "type", "veth", "peer", "name", "far0", "netns", FAR)
        for name, interface, address in ((NEAR, "near0", HEAD), (FAR, "far0", WORKER)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
        yield


def within(namespace: str, *command: str, **variables: str) -> list[str]:
    """A command in a network namespace, with variables set."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["ip", "netns", "exec", namespace, "env", *settings, *command]


def ray_start(namespace: str, *options: str, **variables: str) -> list[str]:
    """The command of a Ray node in a network namespace."""
    ray = str(Path(sys.executable).with_name("ray"))
    return within(namespace, ray, "start", "--block", *options, **ENVIRONMENT, **variables)


@contextmanager
def running(command: list[str]) -> Iterator[int]:
    """A process, with everything that it started; its id."""
    import psutil

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process.pid
    finally:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            process.wait(10)


def can_make_namespaces() -> str | None:
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        ip("netns", "add", "outrider-probe")
        ip("netns", "del", "outrider-probe")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr}"
    return None


def test_a_link_cut_for_ten_seconds_costs_speed_alone() -> None:
    if (reason := can_make_namespaces()) is not None:
        pytest.skip(reason)
    head = ray_start(NEAR, *AS_HEAD, "--num-cpus", "5", "--labels", "side=near")
    with two_namespaces(), running(head), running(ray_start(FAR, *AS_WORKER, "--num-cpus", "6")):
        verdict = run_drill("drill_network", ADDRESS, "near0", before=within(NEAR))
    assert verdict["facts"]["before"] > 0
    assert verdict["facts"]["answers_during"] > 0
    assert verdict["broken"] == []


def test_streams_go_on_while_the_head_restarts() -> None:
    """With Ray's control store kept in Redis: the head and all its processes die, and come back after ten seconds."""
    if (reason := can_make_namespaces()) is not None:
        pytest.skip(reason)
    if (redis := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed")
    store = within(NEAR, redis, "--bind", HEAD, "--port", "6400", "--protected-mode", "no", "--save", "")

    def head(folder: str) -> list[str]:
        """As a pod's: it comes back with empty folders, and knows of the cluster through Redis alone."""
        options = (*AS_HEAD, "--num-cpus", "0", "--temp-dir", folder)
        return ray_start(NEAR, *options, RAY_REDIS_ADDRESS=f"{HEAD}:6400")

    worker = ray_start(FAR, *AS_WORKER, "--num-cpus", "16")
    with (
        TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as first,  # sockets need short paths
        TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as second,
        two_namespaces(),
        running(store),
        running(head(first)) as pid,
        running(worker),
    ):
        verdict = run_drill("drill_head", ADDRESS, WORKER, str(pid), *head(second), before=within(FAR))
    assert verdict["facts"]["answers_during"] > 0
    assert verdict["broken"] == []
