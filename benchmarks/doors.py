"""What the doors cost, on emulated tiers: time to first token over HTTP and over the handle, and many streams at once.

    python -m benchmarks doors [--proxy haproxy] [--streams 200] [--rate 30] [--seconds 8] [--out FILE]

A target pass with its bookkeeping takes about 1/rate seconds and nothing is drafted, so every stream should get `rate`
tokens a second, one by one: the worst case for whatever carries tokens. What the target really gave is printed beside
what the streams got. The client shares the machine; it reads raw sockets to stay cheap.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.batch import target_facts
from benchmarks.support import options
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.provenance import MACHINE, command
from cluster.config.deployment import DeploymentConfig, load_config
from cluster.observability.quantiles import quantile
from deployments.client.client import Client, connect
from deployments.runtime.local import application, free_port, ray_cluster

HELD = 1.05
"""Streams are held if they take at most this many times what their tokens take at the rate wanted."""


@dataclass
class Stream:
    """Arrivals of one streamed answer, in seconds since the start of the run."""

    arrivals: list[float] = field(default_factory=list)
    status: int = 0


def config(slots: int, pass_ms: float, embedded: bool) -> DeploymentConfig:
    """Emulated tiers without a draft."""
    return load_config(
        {
            "model_id": "emulated",
            "target": {
                "engine": "emulated",
                "model": "emulated:reference",
                "engine_kwargs": {"pass_ms": pass_ms},
                "settings": {"slots": slots, "context": 4096},
            },
            "draft": {"kind": "none"},
            "orchestrator": {"embedded": embedded},
            "ingress": {"port": free_port()},
        }
    )


async def stream(url: str, tokens: int, started: float, name: str) -> Stream:
    """Read one answer off a socket; a chunk with text is an arrival."""
    parts, got = urlsplit(url), Stream()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    body = json.dumps({"prompt": name, "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    writer.write(
        f"POST {parts.path}/v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    try:
        got.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                got.arrivals.append(time.perf_counter() - started)
    finally:
        writer.close()
    return got


def first_token_ms(url: str, handle: Client, samples: int = 60) -> dict[str, float]:
    """Median time to first token of one request at a time, over each door, taking turns."""
    found: dict[str, list[float]] = {"http": [], "handle": []}
    with connect(url) as http:
        for i in range(samples):
            for name, client in (("http", http), ("handle", handle)):
                started = time.perf_counter()
                answer = client.stream(f"sample {i}", max_tokens=1, temperature=0.0)
                next(answer)
                found[name].append((time.perf_counter() - started) * 1e3)
                answer.close()
    return {name: statistics.median(values[5:]) for name, values in found.items()}


async def crowd(url: str, streams: int, tokens: int) -> list[Stream]:
    """All streams at once."""
    started = time.perf_counter()
    return await asyncio.gather(*(stream(url, tokens, started, f"stream {i}") for i in range(streams)))


def cpu_seconds() -> dict[str, float]:
    """CPU time of Ray's processes on this machine so far, by what they are."""
    ticks, found = os.sysconf("SC_CLK_TCK"), {"this client": time.process_time()}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                name = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            with open(f"/proc/{entry}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if name.startswith("ray::"):
            kind = name.removeprefix("ray::").split(".")[0].split(":")
            key = kind[-1] if kind[0] == "ServeReplica" else kind[0]
        elif "raylet" in name.split(" ")[0]:
            key = "raylet"
        elif "gcs_server" in name.split(" ")[0]:
            key = "gcs"
        else:
            continue
        found[key] = found.get(key, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
    return found


def main(argv: Sequence[str]) -> int:
    parser = options.parser("doors", __doc__)
    parser.add_argument("--streams", type=options.at_least(1), default=200)
    parser.add_argument("--rate", type=float, default=30.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--overhead", type=float, default=3.0, help="ms of a pass that are the target's bookkeeping")
    parser.add_argument("--proxy", choices=("serve", "haproxy"), default="serve")
    parser.add_argument("--apart", action="store_true", help="orchestrators in processes of their own")
    parser.add_argument("--out")
    arguments = parser.parse_args(argv)
    tokens = int(arguments.rate * arguments.seconds)
    told: dict[str, Any] = {
        "command": command(),
        "machine": MACHINE,
        "orchestrator": "apart" if arguments.apart else "embedded",
        "proxy": arguments.proxy,
    }
    with ray_cluster(proxy=arguments.proxy):
        with application(config(16, 5.0, not arguments.apart)) as url, connect("auto") as handle:
            first = first_token_ms(url, handle)
            told["time to first token, ms"] = {**first, "of which the target's pass": 5.0}
        pass_ms = 1e3 / arguments.rate - arguments.overhead
        with (
            application(config(arguments.streams, pass_ms, not arguments.apart)) as url,
            connect(url) as client,
        ):
            asyncio.run(crowd(url, 8, 8))  # warm up
            facts, before, started = target_facts(client.status()), cpu_seconds(), time.perf_counter()
            results = asyncio.run(crowd(url, arguments.streams, tokens))
            wall = time.perf_counter() - started
            after, done = cpu_seconds(), target_facts(client.status())
    gaps = [b - a for one in results for a, b in zip(one.arrivals, one.arrivals[1:], strict=False)]
    passes = done["passes"] - facts["passes"]
    last = max(one.arrivals[-1] for one in results if one.arrivals)
    told["streams"] = {
        "streams": arguments.streams,
        "failed": sum(one.status != 200 for one in results),
        "chunks": sum(len(one.arrivals) for one in results),
        "tokens asked": tokens * arguments.streams,
        "seconds": round(last, 2),
        "seconds if nothing were in the way": arguments.seconds,
        "ms per pass of the target": round(1e3 * (done["busy_s"] - facts["busy_s"]) / passes, 1),
        "gap p50 ms": round(1e3 * statistics.median(gaps), 1),
        "gap p99 ms": round(1e3 * quantile(gaps, 0.99), 1),
        "first token p50 ms": round(1e3 * statistics.median(one.arrivals[0] for one in results if one.arrivals), 1),
        "cores used": {k: round((v - before.get(k, 0.0)) / wall, 2) for k, v in sorted(after.items())},
    }
    text = json.dumps(told, indent=2)
    print(text)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    streams = told["streams"]
    return print_goals(
        [
            Goal("ms that HTTP adds to the first token of the handle", first["http"] - first["handle"], 5.0, False),
            Goal("time of the streams over the tokens' own", last / arguments.seconds, HELD, at_least=False),
            Goal("failed streams", streams["failed"], 0, at_least=False),
        ]
    )
