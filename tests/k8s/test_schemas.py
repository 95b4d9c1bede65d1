"""Every document of every overlay against the schema of its kind."""

from __future__ import annotations

import warnings
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from built import K8S, OVERLAYS, ROOT, build, groups, kinds, rayservice

from cluster.config.deployment import load_config

CUSTOM = {"RayService": "rayservice", "PodMonitor": "podmonitor", "PrometheusRule": "prometheusrule"}
VERSION = "1.32"
overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def custom_schema(kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = yaml.safe_load((ROOT / f"tests/k8s/schemas/{CUSTOM[kind]}.yaml").read_text())
    return schema


def test_every_overlay_is_tested() -> None:
    assert {path.name for path in (K8S / "overlays").iterdir()} == set(OVERLAYS)


@overlays
def test_core_resources(overlay: str) -> None:
    core = [document for document in build(overlay) if document["kind"] not in CUSTOM]
    assert core
    for document in core:
        kubernetes_validate.validate(document, VERSION, strict=True)


@overlays
def test_custom_resources(overlay: str) -> None:
    custom = [document for document in build(overlay) if document["kind"] in CUSTOM]
    assert custom
    for document in custom:
        jsonschema.validate(document, custom_schema(document["kind"]))


@overlays
def test_pod_templates_are_pods(overlay: str) -> None:
    for name, group in groups(overlay).items():
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"] = {"name": name, **pod["metadata"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)


@overlays
def test_the_serve_service_is_a_service(overlay: str) -> None:
    service = {"apiVersion": "v1", "kind": "Service", **rayservice(overlay)["spec"]["serveService"]}
    kubernetes_validate.validate(service, VERSION, strict=True)


@overlays
def test_serve_config(overlay: str) -> None:
    """Ray's own schema takes it, and Outrider takes the arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's models use what pydantic will drop
        from ray.serve.schema import ServeDeploySchema
    config = ServeDeploySchema.model_validate(yaml.safe_load(rayservice(overlay)["spec"]["serveConfigV2"]))
    (application,) = config.applications
    loaded = load_config(application.args)
    assert loaded.name == application.name
    assert loaded.ingress.port == config.http_options.port
    assert config.http_options.host == "0.0.0.0"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["spec"].update(serveConfigV3="x"),
        lambda d: d["spec"]["rayClusterConfig"].update(gcsFaultToleranceOption={"redisAddress": "r:6379"}),
        lambda d: d["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(minReplica=1),
        lambda d: d["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["resources"].update(CPU=3),
        lambda d: d["spec"].pop("rayClusterConfig"),
        lambda d: d["metadata"].update(name="-out"),
    ],
)
def test_the_reduced_schema_refuses(spoil: Any) -> None:
    """A schema that lets everything pass proves nothing."""
    document = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())
    spoil(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, custom_schema("RayService"))


@overlays
def test_no_secret_is_committed(overlay: str) -> None:
    assert not kinds(overlay, "Secret")
