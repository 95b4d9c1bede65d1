"""What Ray and Ray Serve keep to themselves, and Outrider needs: one function for each.

docs/private-apis.md says why, and which public way was looked for; tests/deployments/runtime/test_ray_internals.py
looks for every name in the installed version.
"""

from __future__ import annotations

from typing import Any


def with_version(deployment: Any, version: str) -> Any:
    """A Serve deployment of this version: replicas are restarted when it changes, and not otherwise.

    Serve draws a version at random for every `serve.run`, which restarts all replicas, targets with their models
    included. The public `version` was removed.
    """
    return deployment.options(_internal=True, version=version)


def over_grpc(handle: Any) -> Any:
    """The same handle, with calls over gRPC, whatever the cluster's environment says (see orchestrator/handle.py)."""
    return handle.options(_by_reference=False)


def http_port() -> int | None:
    """Where Serve's proxies listen; None when Serve does not run. It keeps the port it was first started with."""
    client = _client()
    return None if client is None else int(client.http_config.port)


def application_details() -> dict[str, dict[str, Any]]:
    """Applications by name, as Serve's REST API has them: `serve.status` leaves out how they were deployed."""
    details: dict[str, dict[str, Any]] = _client().get_serve_details()["applications"]
    return details


def deploy(applications: list[dict[str, Any]], *, wait: bool = False) -> None:
    """Deploy applications from a file's parts, as `serve deploy` does; all others that were deployed so go."""
    from ray.serve.schema import ServeDeploySchema

    _client().deploy_apps(ServeDeploySchema.model_validate({"applications": applications}), _blocking=wait)


def begin_delete(name: str) -> None:
    """Have Serve delete an application, without waiting for the end of what it has under way."""
    from ray import serve

    serve.delete(name, _blocking=False)


def free_resources() -> dict[str, dict[str, float]]:
    """What every node has left, by the node's id. `ray.available_resources` has only the sum."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def _client() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()
