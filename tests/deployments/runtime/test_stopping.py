"""`outrider serve` as a process: started by a model's name, stopped by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cluster.config.deployment import load_config
from deployments.runtime.local import free_port

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_started_by_a_model_s_name_is_stopped_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Lines of progress, the configuration it used, a key that is asked for; then "Stopping" and exit code 0."""
    port, saved, log = free_port(), tmp_path / "used.yaml", tmp_path / "log"
    command = [
        sys.executable, "-m", "deployments.cli.main", "serve", "emulated:h100-70b", "--draft", "emulated:l4-1b",
        "--port", str(port), "--api-key", "secret", "--set", "ingress.batch_folder=null", "--save", str(saved),
    ]  # fmt: skip
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    try:
        while "Serving" not in log.read_text() and server.poll() is None:
            pass
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": "a", "max_tokens": 3}
        statuses = [
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code
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
