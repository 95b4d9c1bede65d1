"""Pods without Kubernetes: processes in network namespaces of this machine, each with an address of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Namespace:
    name: str
    address: str
    _started: list[subprocess.Popen[str]] = field(default_factory=list, compare=False)

    def start(self, *command: str, log: Path, **environment: str) -> subprocess.Popen[str]:
        """Run a command in it. Its standard input and output are pipes, its errors go to `log`."""
        with log.open("a") as errors:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._started.append(process)
        return process

    def kill(self) -> None:
        """Everything in it ends at once, as when a node is lost."""
        while pids := _ip("netns", "pids", self.name).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        while self._started:
            with self._started.pop() as process:  # closes its pipes
                process.kill()


@contextlib.contextmanager
def two_namespaces(first: str, second: str) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces with a link between them and to nowhere else; what runs in them ends with the context."""
    unique = os.getpid()
    made = [Namespace(f"{first}-{unique}", "10.99.0.1"), Namespace(f"{second}-{unique}", "10.99.0.2")]
    with contextlib.ExitStack() as stack:
        for space in made:
            _ip("netns", "add", space.name)
            stack.callback(_ip, "netns", "del", space.name)
            stack.callback(space.kill)
        ends = [f"a{unique}", f"b{unique}"]
        _ip("link", "add", ends[0], "netns", made[0].name, "type", "veth", "peer", ends[1], "netns", made[1].name)
        for space, end in zip(made, ends, strict=True):
            _ip("-n", space.name, "addr", "add", f"{space.address}/30", "dev", end)
            for device in ("lo", end):
                _ip("-n", space.name, "link", "set", device, "up")
        yield made[0], made[1]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
