"""One local Ray cluster with Serve for all tests that need one, and the applications that run on it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
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
    from pathlib import Path

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
