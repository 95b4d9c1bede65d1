"""`outrider serve` as a process: started by a model's name, stopped by a signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from cluster.config.deployment import load_config
from deployments.runtime.local import free_port

pytestmark = pytest.mark.ray


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "host", "folder"), [(signal.SIGTERM, "127.0.0.1", ""), (signal.SIGINT, "::1", "x" * 75)]
)
def test_a_server_started_by_a_model_s_name_is_stopped_by_a_signal(
    tmp_path: Path, number: signal.Signals, host: str, folder: str
) -> None:
    """Lines of progress, the configuration it used, a key that is asked for; then "Stopping" and exit code 0.

    Once on IPv6, where this machine has it, and with a TMPDIR that is too long for sockets.
    """
    if ":" in host and not _has_ipv6():
        host = "127.0.0.1"
    port, saved, log = free_port(), tmp_path / "used.yaml", tmp_path / "log"
    (tmp_path / folder).mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": str(tmp_path / folder)}
    command = [
        sys.executable, "-m", "deployments.cli.main", "serve", "emulated:h100-70b", "--draft", "emulated:l4-1b",
        "--host", host, "--port", str(port), "--api-key", "secret", "--set", "ingress.batch_folder=null",
        "--save", str(saved),
    ]  # fmt: skip
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        while "Serving" not in log.read_text() and server.poll() is None:
            time.sleep(0.1)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        body = {"prompt": "a", "max_tokens": 3}
        statuses = [
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False).status_code
            for headers in ({}, {"authorization": "Bearer secret"})
        ]
        assert statuses == [401, 200]
        config = load_config(saved)
        assert (config.ingress.port, config.ingress.batch_folder, config.draft.kind) == (port, None, "emulated")
        server.send_signal(number)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    lines = [line for line in log.read_text().splitlines() if line and not line.startswith("Starting for")]
    assert lines == [
        f"Configuration: {saved}",
        "Starting Ray",
        "Starting both tiers",
        f"Serving h100-70b at {url}/v1 (Ctrl-C stops it)",
        "Stopping",
    ]
    assert not re.search("Traceback|SIGTERM received", log.read_text())
