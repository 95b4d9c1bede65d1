"""The installed Ray still has what deployments/runtime/ray_internals.py leans on, and the variables that it reads."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.support import ray_nodes
from deployments.runtime import haproxy, ray_internals, serve_environment

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn of each other
    from ray import serve
    from ray._private import state
    from ray.serve import context
    from ray.serve._private import client, constants
    from ray.serve.exceptions import BackPressureError
    from ray.serve.handle import DeploymentHandle

HINT = f"Ray {version('ray')} has moved it: mend deployments/runtime/ray_internals.py, and docs/private-apis.md"


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (serve.Deployment.options, {"_internal", "version"}),
        (DeploymentHandle.options, {"_by_reference"}),
        (serve.delete, {"name", "_blocking"}),
        (client.ServeControllerClient.deploy_apps, {"config", "_blocking"}),
        (client.ServeControllerClient.get_serve_details, set()),
        (context._get_global_client, set()),
        (state.available_resources_per_node, set()),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_functions_are_there_and_take_these_parameters(function: Callable[..., Any], parameters: set[str]) -> None:
    assert parameters <= set(inspect.signature(function).parameters), HINT


def test_the_client_knows_the_port() -> None:
    assert isinstance(client.ServeControllerClient.http_config, property), HINT


def test_a_version_is_taken_and_kept() -> None:
    class Replica:
        pass

    one = ray_internals.with_version(serve.deployment(Replica), "1")
    assert (one.version, one.options(num_replicas=2, _internal=True).version) == ("1", "1"), HINT


@pytest.mark.parametrize(
    "name", [*serve_environment.environment(), *haproxy.environment(lambda: 1), ray_nodes.WORKER_PORT]
)
def test_serve_reads_the_variables(name: str) -> None:
    """Each is a constant of the same name."""
    assert hasattr(constants, name), f"Ray Serve {version('ray')} knows no {name}: see docs/private-apis.md"


def test_a_full_queue_is_a_public_error() -> None:
    assert issubclass(BackPressureError, Exception)
