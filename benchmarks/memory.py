"""Does anything grow with time? Resident memory of every process of the demo, before and after 500 requests.

`python -m benchmarks memory` serves the demo pair, warms it up with 100 requests, and prints what 500 more changed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.support import options
from cluster.config.deployment import load_config
from deployments.cli.demo import CONFIG
from deployments.client.client import Client, connect
from deployments.runtime.local import application, free_port, ray_cluster

WARM_UP = 100
PARTS = ("TargetActor", "DraftActor", "Orchestrator", "Ingress")


def resident() -> dict[str, float]:
    """MiB held by each part of the application that this process started, by part and process id."""
    held = {}
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            for part in PARTS:
                if f"ray::{part}" in title or (title.startswith("ray::ServeReplica") and f":{part}" in title):
                    held[f"{part} {process.pid}"] = process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    return held


def prompts(first: int, count: int) -> Iterator[str]:
    """Prompts of about 5 to 60 tokens, no two alike."""
    for i in range(first, first + count):
        yield f"Note {i}: " + "and then it rained. " * (i % 12)


def main(argv: Sequence[str]) -> int:
    """Run and print."""
    parser = options.parser("memory", __doc__)
    parser.add_argument("--requests", type=options.at_least(1), default=500)
    requests = parser.parse_args(argv).requests
    console = Console()
    config = load_config(CONFIG)
    config = config.model_copy(update={"ingress": config.ingress.model_copy(update={"port": free_port()})})
    with console.status("Starting"), ray_cluster(), application(config) as url, connect(url) as client:
        _send(client, prompts(0, WARM_UP))
        before = resident()
        batches = [list(prompts(start, 25)) for start in range(WARM_UP, WARM_UP + requests, 25)]
        for batch in track(batches, console=console, description=f"{requests} requests"):
            _send(client, batch)
        after = resident()
    table = Table(title=f"Resident memory, MiB ({platform.machine()}, {os.cpu_count()} cores)")
    for column in ("process", "before", f"after {requests} requests", "change"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, mib in before.items():
        now = after.get(name)
        change = "gone" if now is None else f"{now - mib:+.1f}"
        table.add_row(name.split()[0], f"{mib:.0f}", "-" if now is None else f"{now:.0f}", change)
    console.print(table)
    return 0


def _send(client: Client, texts: Iterable[str]) -> None:
    results = client.generate(list(texts), concurrency=8, max_tokens=4, temperature=0, progress=False)
    failed = [result for result in results if result.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0].error}")
