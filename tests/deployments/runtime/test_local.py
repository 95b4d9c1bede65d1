"""Starting and stopping on this machine, as far as it needs no Ray: addresses, lines of progress, signals, sockets."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.errors import ConfigError
from cluster.config.deployment import load_config
from deployments.client.cluster_owner import refuse_others
from deployments.runtime import ray_folder
from deployments.runtime.local import interruptible, server_url, waits_for


@pytest.mark.parametrize(
    ("host", "prefix", "url"),
    [
        ("127.0.0.1", "/", "http://127.0.0.1:80"),
        ("0.0.0.0", "/a/", "http://127.0.0.1:80/a"),
        ("::1", "/", "http://[::1]:80"),
        ("::", "/", "http://[::1]:80"),
        ("fd00::5", "/", "http://[fd00::5]:80"),
        ("a.example", "/", "http://a.example:80"),
    ],
)
def test_where_a_server_is_found(host: str, prefix: str, url: str) -> None:
    assert server_url(host, 80, prefix) == url


def test_what_a_start_waits_for() -> None:
    found = {"target": {"states": {"STARTING": 1}}, "draft": {"states": {"RUNNING": 1}}}
    assert waits_for({}, 4.6) == "Starting for 5 s: Ray Serve comes up"
    assert waits_for(found, 10) == "Starting for 10 s: the target tier loads its model, the draft tier is there"  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_is_said_once(number: signal.Signals) -> None:
    told: list[str] = []
    with interruptible(told.append):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert told == ["Stopping"]


def test_sockets_have_room() -> None:
    """A socket's path, 68 bytes behind the folder's, has at most 107: a folder of 39 fits, one of 40 does not."""
    fits, long = "/" + "x" * 38, "/" + "x" * 39
    assert len(fits + "/ray/session_2026-12-01_04-29-29_123456_1234567/sockets/plasma_store") == 107
    assert ray_folder.environment({"TMPDIR": fits}) == {}
    assert ray_folder.environment({}) == {}
    assert ray_folder.environment({"TMPDIR": long}, ("/nowhere", "/tmp")) == {"RAY_TMPDIR": "/tmp"}
    assert ray_folder.environment({"TMPDIR": long, "RAY_TMPDIR": "/tmp"}) == {}
    with pytest.raises(ConfigError, match="RAY_TMPDIR has more than 39"):
        ray_folder.environment({"RAY_TMPDIR": long})
    with pytest.raises(ConfigError, match="set RAY_TMPDIR"):
        ray_folder.environment({"TMPDIR": long}, ("/nowhere",))


def test_another_users_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = {"session_dir": str(tmp_path), "gcs_address": "10.0.0.1:6379"}
    owner = tmp_path.stat().st_uid
    refuse_others("auto", found)
    refuse_others("auto", {"session_dir": "/nowhere"}, user=owner + 1)
    refuse_others("10.0.0.1:6379", found, user=owner + 1)
    with pytest.raises(ConfigError, match=r"'s: to use it all the same, name it: 10\.0\.0\.1:6379"):
        refuse_others("auto", found, user=owner + 1)
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "10.0.0.1:6379")
    refuse_others("auto", found, user=owner + 1)


def test_two_servers_of_one_user_have_batches_of_their_own(tmp_path: Path) -> None:
    def folder(port: int, application: str) -> Path | None:
        config = load_config({"ingress": {"batch_folder": str(tmp_path), "port": port}})
        return config.ingress.batches(application)

    assert folder(8000, "a") == tmp_path / "a-8000"
    assert len({folder(8000, "a"), folder(8001, "a"), folder(8000, "b")}) == 3
    assert load_config({"ingress": {"batch_folder": None}}).ingress.batches("a") is None


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_what_a_file_tells_serve_is_obeyed(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        "http_options: {host: 0.0.0.0, port: 8123}\n"
        "applications: [{name: mine, route_prefix: /x, import_path: a:b, args: {model_id: m, ingress: {queue: 3}}}]\n",
    )
    config = load_config(file)
    assert (config.name, config.ingress.route_prefix) == ("mine", "/x")
    assert (config.ingress.host, config.ingress.port, config.ingress.queue) == ("0.0.0.0", 8123, 3)


@pytest.mark.parametrize(
    ("http", "application", "told"),
    [
        ("port: 9", "args: {ingress: {port: 10}}", "http_options.port is 9, and args.ingress.port 10"),
        ("host: a", "args: {ingress: {host: b}}", "http_options.host is 'a', and args.ingress.host 'b'"),
        ("port: 9", "name: a, args: {name: b}", "name is 'a', and args.name 'b'"),
        ("port: 9", "route_prefix: /a, args: {ingress: {route_prefix: /b}}", "args.ingress.route_prefix '/b'"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, http: str, application: str, told: str) -> None:
    file = write(tmp_path / "c.yaml", f"http_options: {{{http}}}\napplications: [{{{application}}}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert told in str(caught.value)


def test_serve_s_log_stays_off_the_terminal() -> None:
    """In a process of its own: the first import of Serve sets the level of its log."""
    program = (
        "import logging\nfrom deployments.runtime.local import quiet_serve\nquiet_serve()\n"
        "print(logging.getLogger('ray.serve').getEffectiveLevel())"
    )
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert int(told.stdout) == logging.ERROR
