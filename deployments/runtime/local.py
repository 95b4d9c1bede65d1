"""Runs an application for one terminal: on a Ray cluster of its own, or on one that exists. Stops what it started."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from actors.errors import ConfigError
from cluster.config.deployment import DeploymentConfig, Proxy
from cluster.scaling.placement import TierName
from deployments.client.cluster_owner import refuse_others
from deployments.client.http_service import check_ray_address
from deployments.runtime import haproxy, ray_folder, ray_internals, serve_environment

OBJECT_STORE_BYTES = 200 * 1024 * 1024
"""Everything that crosses an actor boundary is small; Ray's default would take a third of the memory."""
LOGICAL_CPUS = 16
"""Logical CPUs are Ray's bookkeeping. An application on a laptop must not wait for cores it does not have."""

ALLOCATOR = {"MALLOC_ARENA_MAX": "2"}
"""glibc gives threads arenas of their own, sixteen on two cores, and what is freed in one is of no use to another: the
many threads of Ray's processes then grow for hours (benchmarks/LOG.md). The image says the same."""

STARTING_S = 30.0
"""How long a Ray cluster that was named has to listen: it may be starting beside this."""
PROGRESS_S = 5.0
"""How often to tell what a start waits for."""
Report = Callable[[str], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM)

STOP_S = 3.0
"""How long an application on a cluster of our own has to let go of its models before the cluster's processes end."""

_asked_to_stop = threading.Event()
_handler: list[Callable[[int, FrameType | None], None]] = []
"""The handler of `interruptible`, while it is in force."""


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when nothing can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"port {port} is in use: choose another one with --port", "ingress.port") from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", "ingress.host") from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def ray_cluster(address: str | None = None, proxy: Proxy = "serve") -> Iterator[bool]:
    """A Ray connection; yields whether the cluster is our own. Our own ends with the context, another one stays.

    address: of an existing cluster ("auto" finds the one of this machine); None starts one.
    proxy: of a cluster that is started here; another cluster has chosen its own.
    """
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if ray.is_initialized():
        yield False
        return
    variables = dict[str, str]()
    if address is None:
        variables = ALLOCATOR | serve_environment.environment() | ray_folder.environment(os.environ)
        if proxy == "haproxy":
            variables |= haproxy.environment(free_port)
    with exported(variables), _connected(address) as own:
        yield own


@contextlib.contextmanager
def exported(variables: dict[str, str]) -> Iterator[None]:
    """Processes that are started in this context find these variables. What the environment says already is kept."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[bool]:
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address is None:
        ray.init(
            address="local",
            num_cpus=max(LOGICAL_CPUS, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **quiet,
        )
    else:
        check_ray_address(address, patience_s=STARTING_S)
        try:
            context = ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            hint = "" if address == "auto" else " (a cluster with Ray's tokens wants RAY_AUTH_MODE=token)"
            raise ConfigError(f"cannot reach the Ray cluster at {address}{hint}: {error}") from error
        try:
            refuse_others(address, context.address_info)
        except ConfigError:
            ray.shutdown()
            raise
    _take_signals()  # Ray has put its own handler of SIGTERM in the place of ours: it aborts with a stack trace
    try:
        yield address is None
    finally:
        ray.shutdown()


@contextlib.contextmanager
def application(config: DeploymentConfig, report: Report = lambda _: None) -> Iterator[str]:
    """Run the application on the connected cluster until the context ends; yields its address.

    Raises ConfigError when it cannot start as configured, with what to change.
    """
    from ray import serve

    from deployments.app import application as build

    quiet_serve()
    serve.start(http_options={"host": config.ingress.host, "port": config.ingress.port})
    report("Starting both tiers" if config.draft.kind != "none" else "Starting the target tier")
    try:
        stop_if_asked()
        try:
            with _progress_reported(config, report):
                serve.run(build(config), name=config.name, route_prefix=config.ingress.route_prefix)
        except RuntimeError as error:
            raise ConfigError(_reason(config.name) or f"the application did not start: {error}") from error
        url = server_url(config.ingress.host, _port(config), config.ingress.route_prefix)
        _await_ready(config, url)
        yield url
    finally:
        with contextlib.suppress(Exception):  # the cluster may be gone already
            _delete(config.name)


def quiet_serve() -> None:
    """Keep Serve's log off the terminal. Importing Serve sets the level of its log, so that comes first."""
    import ray.serve  # noqa: F401

    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def server_url(host: str, port: int, prefix: str = "/") -> str:
    """Where a server that listens on `host` is found from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix.rstrip('/')}"


def _delete(name: str) -> None:
    """Delete the application. One that is told to stop gets a moment for it: its answers are broken off."""
    from ray import serve

    if not _asked_to_stop.is_set():
        serve.delete(name)
        return
    ray_internals.begin_delete(name)
    deadline = time.monotonic() + STOP_S
    while name in serve.status().applications and time.monotonic() < deadline:
        time.sleep(0.1)


@contextlib.contextmanager
def _progress_reported(config: DeploymentConfig, report: Report) -> Iterator[None]:
    """Says, while an application starts, which tiers are not there yet, and which cannot be placed, and why."""
    from deployments.tiers.serve_status import look

    started, told = threading.Event(), set[str]()
    began = time.monotonic()

    def watch() -> None:
        while not started.wait(PROGRESS_S):
            found = look(config.name, config)
            for tier, seen in found.items():
                if (obstacle := seen.get("obstacle")) and obstacle not in told:
                    told.add(obstacle)
                    report(f"The {tier} tier cannot be placed: {obstacle}")
            report(waits_for(found, time.monotonic() - began))

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        started.set()
        watcher.join()


def waits_for(found: Mapping[TierName, Mapping[str, Any]], seconds: float) -> str:
    """What a start waits for, in one line; found: as serve_status.look tells it."""
    states = [(tier, seen.get("states", {})) for tier, seen in found.items()]
    parts = [f"the {tier} tier {'is there' if told.get('RUNNING') else 'loads its model'}" for tier, told in states]
    return f"Starting for {seconds:.0f} s: {', '.join(parts) or 'Ray Serve comes up'}"


def _port(config: DeploymentConfig) -> int:
    """Where Serve listens: it keeps the port it was first started with, whatever a later application asks for."""
    return ray_internals.http_port() or config.ingress.port


@contextlib.contextmanager
def interruptible(report: Report = lambda _: None) -> Iterator[None]:
    """Being terminated is being interrupted: whatever was started is stopped. Interrupts are remembered, see below.

    report: told "Stopping" once, when that is asked for.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        first = not _asked_to_stop.is_set()
        _asked_to_stop.set()
        if first:
            report("Stopping")
        raise KeyboardInterrupt

    former = {number: signal.getsignal(number) for number in SIGNALS}
    _handler.append(interrupt)
    _take_signals()
    try:
        yield
    finally:
        _handler.remove(interrupt)
        for number, handler in former.items():
            signal.signal(number, handler)
        _asked_to_stop.clear()


def _take_signals() -> None:
    """Put the handler of `interruptible` in force (again)."""
    if _handler and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _handler[-1])


def stop_if_asked() -> None:
    """Raises KeyboardInterrupt again where one was lost: Python drops what is raised in a destructor or a callback,
    and a cluster that starts runs many of both."""
    if _asked_to_stop.is_set():
        raise KeyboardInterrupt


def wait_for_interrupt() -> None:
    """Returns at Ctrl-C: the way in which serving is meant to end."""
    with contextlib.suppress(KeyboardInterrupt):
        stop_if_asked()
        threading.Event().wait()


def _await_ready(config: DeploymentConfig, url: str, limit_s: float = 60.0) -> None:
    """Both tiers have been found by the orchestrator. Raises ConfigError when one is refused."""
    import httpx

    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        stop_if_asked()
        time.sleep(0.05)
        try:
            if httpx.get(f"{url}/ready", timeout=limit_s, trust_env=False).status_code == 200:
                return
            refused = httpx.get(f"{url}/status", timeout=limit_s, trust_env=False).json()
        except (httpx.TransportError, ValueError):  # the proxy is on its way up
            continue
        for tier in ("target", "draft"):
            for reason in refused.get(tier, {}).get("refused", {}).values():
                raise ConfigError(f"the {tier} cannot be used: {reason}")
    raise ConfigError(f"the tiers of {config.name} were not ready within {limit_s:.0f} s")


def _reason(name: str) -> str | None:
    """Why a deployment of the application failed, in one line, as far as Serve knows."""
    from ray import serve

    with contextlib.suppress(Exception):
        status = serve.status().applications[name]
        for deployment in status.deployments.values():
            for line in reversed(deployment.message.splitlines()):
                if "could not be built:" in line:
                    return str(line.partition("RuntimeError: ")[2] or line.strip())
        message = str(status.message).strip()
        return message.splitlines()[-1] if message else None
    return None
