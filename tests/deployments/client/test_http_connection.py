"""How every command connects: keys that files end in a line break, loopback without proxies, proxies that cannot be."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from actors.errors import ConfigError
from deployments.client.http_connection import connection, is_loopback, server_root
from deployments.client.http_service import HttpService

PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    """Answers 200 to everything; its list holds the Authorization headers that came."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["authorization"])
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        serving = threading.Thread(target=http.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{http.server_port}", seen
        http.shutdown()
        serving.join()


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.8.9.10", True),
        ("http://localhost:8000/v1", True),
        ("http://app.localhost.", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://10.0.0.1", False),
        ("https://localhost.example", False),
        ("http://[2001:db8::1]", False),
    ],
)
def test_loopback(url: str, here: bool) -> None:
    assert is_loopback(url) is here


async def test_a_key_loses_its_line_break_and_loopback_knows_no_proxy(
    server: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = server
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:9")
    async with connection(url + "/v1", "or-abc\r\n") as http:
        assert (await http.get("/status")).status_code == 200
    service = HttpService(url, "\tor-abc\n")
    assert await service.ready()
    await service.close()
    assert seen == ["Bearer or-abc"] * 2


@pytest.mark.parametrize("key", ["or-se\ncret", "or-sécret", " \n", "or-\x00secret"])
def test_a_key_that_no_header_carries_is_never_shown(key: str) -> None:
    for make in (lambda: connection("http://a", key), lambda: HttpService("http://a", key)):
        with pytest.raises(ConfigError, match="the API key") as caught:
            make()
        assert "cret" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "socks5://127.0.0.1:9", "http://127.0.0.1:port"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigError, match=r"the proxy .* for http://server\.example cannot be used"):
        connection("http://server.example/")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://", "ftp://a", "http://a:port", "http://\udcff"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="say http://HOST:PORT"):
        server_root(url)


def test_a_server_elsewhere_is_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is for loopback only: httpx still takes the environment's proxy for other hosts."""
    made: list[bool] = []
    real = httpx.AsyncClient

    def record(**options: object) -> httpx.AsyncClient:
        made.append(bool(options["trust_env"]))
        return real()

    monkeypatch.setattr(httpx, "AsyncClient", record)
    connection("http://server.example")
    connection("http://127.0.0.1")
    assert made == [True, False]


def test_commands_say_it_in_one_line(tmp_path: Path) -> None:
    """`outrider batch` and `outrider status` as a shell with such an environment runs them."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    environment = {"PATH": "", "ALL_PROXY": "socks://127.0.0.1:9", "PYTHONPATH": ":".join(filter(None, sys.path))}
    for arguments in (["batch", str(source), str(tmp_path / "out")], ["status"]):
        done = subprocess.run(
            [sys.executable, "-m", "deployments.cli.main", *arguments, "--url", "http://server.example"],
            env=environment, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert "the proxy that the environment names" in done.stderr
