"""One local Ray cluster with Serve for all tests that need one, and the applications that run on it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Tiny models in many processes: a second torch thread only waits for the first one's core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

EMULATED: dict[str, Any] = {
    "name": "emulated",
    "model_id": "emulated",
    "target": {"engine": "emulated", "model": "emulated:reference", "settings": {"slots": 64}},
    "draft": {
        "kind": "emulated",
        "model": "emulated:reference",
        "settings": {"slots": 64},
        "health": {"period_s": 1.0, "ping_timeout_s": 3.0},
    },
}


@cache
def needs_ray(module: Path) -> bool:
    """Whether tests in a file use the Ray cluster of this run."""
    return "pytest.mark.ray" in module.read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: modules that need the Ray cluster, then those that need the demo model. The demo
    model's application comes up last, because it stays up."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        ray, demo = needs_ray(item.path), item.get_closest_marker("demo") is not None
        return not ray, ray == demo

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of the processes of `make test`, one runs all modules that need the Ray cluster, so that there is only one;
    the others go, whole, to whichever is free."""
    from xdist.scheduler import LoadFileScheduling

    class OneRayCluster(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "ray" if needs_ray(config.rootpath / module) else module

    return OneRayCluster(config, log)


@pytest.fixture(scope="session")
def ray_port() -> Iterator[int]:
    """A Ray cluster of this test run; the value is the port that Serve listens on."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns until this is chosen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not ours: Ray's own modules
        from deployments.runtime.local import free_port, ray_cluster

        with ray_cluster():
            yield free_port()
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # threads that outlive the cluster complain of its absence


@pytest.fixture(scope="session")
def emulated_url(ray_port: int) -> Iterator[str]:
    """An application of emulated tiers: exact tokens, real time, no arithmetic."""
    yield from _application(
        EMULATED | {"ingress": {"port": ray_port, "route_prefix": "/emulated", "batch_folder": None}}
    )


@pytest.fixture(scope="session")
def demo_url(ray_port: int) -> Iterator[str]:
    """The demo's real model and draft."""
    import deployments
    from cluster.config.deployment import load_config

    config = load_config(Path(deployments.__file__).with_name("demo.yaml"))
    raw = config.model_dump() | {
        "name": "demo",
        "ingress": {"port": ray_port, "route_prefix": "/demo", "batch_folder": None},
    }
    yield from _application(raw)


def _application(raw: dict[str, Any]) -> Iterator[str]:
    from cluster.config.deployment import load_config
    from deployments.runtime.local import application

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with application(load_config(raw)) as url:
            yield url
