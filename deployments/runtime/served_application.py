"""A running application as Serve has it: which draft it runs, and another one in its place.

The draft tier's `user_config` says which draft it runs. Serve hands a changed one to the replicas of that tier and
leaves all others as they are, provided that the rest of the application is given again as it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from actors.errors import ConfigError, UnavailableError
from cluster.config.deployment import DeploymentConfig, DraftChoice
from cluster.config.serve_names import DRAFT_TIER, ORCHESTRATOR
from deployments.runtime import ray_internals


class ServedApplication:
    """name: of the application, on the Ray cluster that this process is connected to.

    Raises ConfigError if it does not run, has no draft tier, or is not Outrider.
    """

    def __init__(self, name: str, limit_s: float = 600.0) -> None:
        from ray import serve

        self._name, self._limit_s = name, limit_s
        if name not in serve.status().applications:
            raise ConfigError(f"no application {name!r} is running on this Ray cluster")
        self._handle = serve.get_deployment_handle(ORCHESTRATOR, name)
        try:
            raw = self._handle.configuration.remote().result(timeout_s=60)
            self._version: str = self._handle.version.remote().result(timeout_s=60)
        except Exception as error:
            raise ConfigError(f"{name!r} does not say how it was started: is it Outrider, of this version?") from error
        self.config = DeploymentConfig.model_validate(raw)
        if DRAFT_TIER not in self._overview().deployments:
            raise ConfigError(f"{name!r} has no draft tier: its draft.kind is {self.config.draft.kind!r}")

    def choice(self) -> DraftChoice:
        """See rollout.Application."""
        told = self._details()["deployments"][DRAFT_TIER]["deployment_config"].get("user_config")
        return self.config.draft_choice if told is None else DraftChoice.model_validate(told)

    def choose(self, choice: DraftChoice) -> None:
        """See rollout.Application."""
        declared = self._details().get("deployed_app_config")
        if declared is None:
            self._run_again(choice)
        else:
            self._declare_again(choice)

    def status(self) -> dict[str, Any]:
        """See rollout.Application."""
        status: dict[str, Any] = self._handle.status.remote().result(timeout_s=60)
        return status

    @property
    def is_declared(self) -> bool:
        """Whether it was deployed from a file, which then has the last word at the next deployment."""
        return self._details().get("deployed_app_config") is not None

    def _run_again(self, choice: DraftChoice) -> None:
        """As `serve.run` started it."""
        from ray import serve

        from deployments.app import application

        config = self.config.with_draft(choice)
        with _explained(choice):
            serve.run(application(config, self._version), name=self._name, route_prefix=config.ingress.route_prefix)

    def _declare_again(self, choice: DraftChoice) -> None:
        """As `serve deploy` started it, together with all applications that were deployed so."""
        files = [app["deployed_app_config"] for app in ray_internals.application_details().values()]
        files = [with_user_config(file, choice) if file["name"] == self._name else file for file in files if file]
        with _explained(choice):
            ray_internals.deploy(files)
            self._await_running(time.monotonic)

    def _await_running(self, clock: Callable[[], float]) -> None:
        deadline = clock() + self._limit_s
        while (overview := self._overview()).status.value != "RUNNING":
            if overview.status.value == "DEPLOY_FAILED" or clock() > deadline:
                raise RuntimeError(overview.message or f"it is {overview.status.value}")
            time.sleep(0.2)

    def _details(self) -> dict[str, Any]:
        return ray_internals.application_details()[self._name]

    def _overview(self) -> Any:
        from ray import serve

        return serve.status().applications[self._name]


def with_user_config(file: dict[str, Any], choice: DraftChoice) -> dict[str, Any]:
    """The application's part of a file of `serve deploy`, with the draft tier's `user_config` set."""
    others = [one for one in file.get("deployments") or [] if one["name"] != DRAFT_TIER]
    own = next((one for one in file.get("deployments") or [] if one["name"] == DRAFT_TIER), {"name": DRAFT_TIER})
    return file | {"deployments": [*others, own | {"user_config": choice.model_dump(mode="json")}]}


@contextlib.contextmanager
def _explained(choice: DraftChoice) -> Any:
    try:
        yield
    except RuntimeError as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnavailableError(f"{choice.model} could not be put in place: {line}") from error
