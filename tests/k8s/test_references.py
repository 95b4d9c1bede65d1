"""Names in one file that mean something in another: all of them resolve."""

from __future__ import annotations

import importlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from built import K8S, OVERLAYS, ROOT, Document, build, groups, kinds, pods, rayservice, selects

from cluster.config.deployment import DeploymentConfig, load_config
from cluster.kubernetes.manifests import COMPONENT, IMPORT_PATH
from deployments.runtime import serve_environment

overlays = pytest.mark.parametrize("overlay", OVERLAYS)
SECRETS = {"outrider-api-keys", "outrider-hub", "outrider-redis"}


def walk(node: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) of every mapping inside."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield key, value
            yield from walk(value)
    elif isinstance(node, list):
        for item in node:
            yield from walk(item)


def serve_application(overlay: str) -> Document:
    application: Document
    (application,) = yaml.safe_load(rayservice(overlay)["spec"]["serveConfigV2"])["applications"]
    return application


def deployment(overlay: str) -> DeploymentConfig:
    return load_config(serve_application(overlay)["args"])


@overlays
def test_selectors_find_pods(overlay: str) -> None:
    everything = pods(overlay)
    for document in build(overlay):
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if document["kind"] == "Service":
            selector = {"matchLabels": selector}
        if selector:
            assert any(selects(selector, pod.labels) for pod in everything), document["metadata"]["name"]


@overlays
def test_every_process_of_ray_finds_what_serve_must_know(overlay: str) -> None:
    """A proxy runs on every node with a replica, and on the head."""
    for name, group in groups(overlay).items():
        variables = {one["name"]: one.get("value") for one in group["template"]["spec"]["containers"][0]["env"]}
        assert serve_environment.environment().items() <= variables.items(), name


@overlays
def test_peers_of_network_policies_exist(overlay: str) -> None:
    """Peers in this namespace are pods of ours; peers elsewhere are the three that the runbook names."""
    everything = pods(overlay)
    outside = {"kuberay-operator", "prometheus", "kube-dns"}
    for policy in kinds(overlay, "NetworkPolicy"):
        for rule in (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())):
            for peer in (*rule.get("from", ()), *rule.get("to", ())):
                selector = peer.get("podSelector")
                if selector is None:
                    continue
                if "namespaceSelector" in peer:
                    assert set(selector["matchLabels"].values()) <= outside
                else:
                    assert any(selects(selector, pod.labels) for pod in everything)


@overlays
def test_named_ports_exist(overlay: str) -> None:
    """A name that a selected pod lacks silently admits, scrapes or routes nothing."""
    everything = pods(overlay)
    for document in build(overlay):
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        if document["kind"] == "Service":
            names = [port["targetPort"] for port in spec["ports"]]
            selector = {"matchLabels": selector}
        elif document["kind"] == "NetworkPolicy":
            names = [port["port"] for rule in spec.get("ingress", ()) for port in rule.get("ports", ())]
        elif document["kind"] == "PodMonitor":
            names = [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
        else:
            continue
        chosen = [pod for pod in everything if selects(selector, pod.labels)]
        for name in names:
            assert any(name in pod.ports for pod in chosen), (document["metadata"]["name"], name)


@overlays
def test_every_ray_pod_is_scraped_once(overlay: str) -> None:
    monitors = kinds(overlay, "PodMonitor")
    if not monitors:
        pytest.skip("this overlay has no monitoring")
    for pod in pods(overlay):
        if pod.labels["app.kubernetes.io/name"] == "outrider":
            found = [m for m in monitors if selects(m["spec"]["selector"], pod.labels)]
            assert len(found) == 1
            assert pod.ports["metrics"] == 8080


@overlays
def test_probes_ask_ports_that_answer(overlay: str) -> None:
    agent = 52365  # Ray's dashboard agent listens there on every node
    for pod in pods(overlay):
        for container in pod.spec["containers"]:
            for probe in ("readinessProbe", "livenessProbe"):
                action = container.get(probe, {})
                port = (action.get("httpGet") or action.get("tcpSocket") or {"port": agent})["port"]
                assert port == agent or port in pod.ports


@overlays
def test_streams_pass_through_front_pods_only(overlay: str) -> None:
    """The Service's target port is a name, and among the workers only front pods have it."""
    spec = rayservice(overlay)["spec"]
    (port,) = spec["serveService"]["spec"]["ports"]
    assert port["targetPort"] == port["name"] == "serve"
    assert spec["excludeHeadPodFromServeSvc"] is True
    assert [pod.name for pod in pods(overlay) if "serve" in pod.ports] == ["head", "front"]
    assert {pod.ports["serve"] for pod in pods(overlay) if "serve" in pod.ports} == {port["port"]}


@overlays
def test_only_the_ingress_port_is_open_to_all(overlay: str) -> None:
    """Pods are isolated by default, and one policy admits anybody, to one port."""
    policies = kinds(overlay, "NetworkPolicy")
    for pod in pods(overlay):
        assert any(
            selects(p["spec"]["podSelector"], pod.labels) and p["spec"]["policyTypes"] == ["Ingress", "Egress"]
            for p in policies
        )
    anybody = [
        (policy["metadata"]["name"], rule.get("ports"))
        for policy in policies
        for rule in policy["spec"].get("ingress", ())
        if "from" not in rule
    ]
    assert anybody == [("outrider-clients", [{"port": "serve", "protocol": "TCP"}])]


@overlays
def test_claims_accounts_and_classes_exist(overlay: str) -> None:
    names = {kind: {d["metadata"]["name"] for d in kinds(overlay, kind)} for kind in
             ("PersistentVolumeClaim", "ServiceAccount", "PriorityClass")}  # fmt: skip
    for pod in pods(overlay):
        for key, value in walk(pod.spec):
            if key == "claimName":
                assert value in names["PersistentVolumeClaim"]
            if key == "serviceAccountName":
                assert value in names["ServiceAccount"]
            if key == "priorityClassName":
                assert value in names["PriorityClass"]


@overlays
def test_mounts_have_volumes(overlay: str) -> None:
    for pod in pods(overlay):
        volumes = {volume["name"] for volume in pod.spec.get("volumes", ())}
        if pod.name == "outrider-redis":
            volumes.add("data")  # from the claim template
        for container in pod.spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    head_volumes = {volume["name"] for volume in groups(overlay)["head"]["template"]["spec"]["volumes"]}
    sidecar = rayservice(overlay)["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert {mount["name"] for mount in sidecar["volumeMounts"]} <= head_volumes


@overlays
def test_secrets_are_in_the_runbook(overlay: str) -> None:
    """Each Secret that a pod refers to is made by a command in the runbook, with the key that is asked for."""
    runbook = (K8S / "README.md").read_text()
    for key, value in walk(list(build(overlay))):
        if key == "secretKeyRef":
            assert re.search(rf"secret generic {value['name']} .*--from-literal={value['key']}=", runbook), value
            assert value["name"] in SECRETS
        if key == "secretName":
            assert re.search(rf"secret generic {value} ", runbook), value
            assert value in SECRETS


@overlays
def test_every_part_finds_its_pods(overlay: str) -> None:
    """Labels that a part asks for are labels of exactly one group, and a pod of it holds at least one worker."""
    config = deployment(overlay)
    by_name = groups(overlay)
    parts = {"front": config.ingress.labels, "target": config.target.resources.labels}
    if config.draft.kind != "none":
        parts["draft"] = config.draft.resources.labels
    assert config.orchestrator.labels == config.ingress.labels
    for part, labels in parts.items():
        assert labels[COMPONENT] == part
        found = [name for name, group in by_name.items() if labels.items() <= group["labels"].items()]
        assert found == [part]
    for tier, part in ((config.target, "target"), (config.draft, "draft")):
        resources = by_name[part]["resources"]
        assert float(resources["CPU"]) >= tier.resources.num_cpus
        assert float(resources.get("GPU", 0)) >= tier.resources.num_gpus
        limit = by_name[part]["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert limit == resources.get("GPU", "0")


@overlays
def test_keys_are_read_from_the_mounted_secret(overlay: str) -> None:
    path = deployment(overlay).ingress.keys_file
    mounts = {
        mount["name"]: mount for mount in next(p for p in pods(overlay) if p.name == "front").container["volumeMounts"]
    }
    assert path is None or str(Path(path).parent) == mounts["keys"]["mountPath"]
    assert (path is not None) == (overlay != "kind")


@overlays
def test_old_cluster_outlives_the_longest_stream(overlay: str) -> None:
    limit = deployment(overlay).orchestrator.settings.request_timeout_s
    assert rayservice(overlay)["spec"]["rayClusterDeletionDelaySeconds"] > limit


@overlays
def test_import_path(overlay: str) -> None:
    path = serve_application(overlay)["import_path"]
    assert path == IMPORT_PATH
    module, name = path.split(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's models use what pydantic will drop
        importlib.import_module(module)
    assert callable(getattr(importlib.import_module(module), name))


@overlays
def test_versions_and_images_agree(overlay: str) -> None:
    """One Ray version (the pinned one), one Outrider version (the project's) everywhere."""
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    version = re.search(r'^version = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert pinned is not None
    assert version is not None
    assert rayservice(overlay)["spec"]["rayClusterConfig"]["rayVersion"] == pinned[1]
    images = {value for key, value in walk(rayservice(overlay)) if key == "image"}
    assert len(images) == 1
    assert re.fullmatch(rf"outrider:{re.escape(version[1])}(-cuda)?", images.pop())


@overlays
def test_pods_are_locked_down(overlay: str) -> None:
    """The `restricted` profile, a read-only root, and room to write where Ray and the libraries write."""
    for pod in pods(overlay):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] >= 100
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        if pod.name != "head":  # whose account the operator makes
            assert pod.spec["automountServiceAccountToken"] is False
        for container in pod.spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            assert limits["memory"] == requests["memory"]
            assert "cpu" in requests
            assert "cpu" not in limits
    for name in groups(overlay):
        mounts = {
            mount["mountPath"] for mount in groups(overlay)[name]["template"]["spec"]["containers"][0]["volumeMounts"]
        }
        assert {"/tmp", "/home/outrider"} <= mounts


@overlays
def test_everything_is_in_one_namespace(overlay: str) -> None:
    cluster_wide = {"Namespace", "PriorityClass"}
    for document in build(overlay):
        if document["kind"] not in cluster_wide:
            assert document["metadata"]["namespace"] == "outrider"


@overlays
def test_names_are_unique(overlay: str) -> None:
    names = [(d["kind"], d["metadata"]["name"]) for d in build(overlay)]
    assert len(names) == len(set(names))


def test_budgets_are_of_the_form_that_works_for_operators() -> None:
    """Kubernetes takes only an integer minAvailable for pods without a built-in controller, and none for drafts."""
    budgets = list(itertools.chain.from_iterable(kinds(overlay, "PodDisruptionBudget") for overlay in OVERLAYS))
    assert budgets
    for budget in budgets:
        assert isinstance(budget["spec"]["minAvailable"], int)
        assert "maxUnavailable" not in budget["spec"]
        assert budget["spec"]["selector"]["matchLabels"][COMPONENT] != "draft"


def test_spot_nodes_hold_nothing_but_drafts() -> None:
    for pod in pods("spot-drafts"):
        spot = pod.spec.get("nodeSelector", {}).get("karpenter.sh/capacity-type") == "spot"
        assert spot == (pod.name == "draft")
    assert "serve" not in next(pod for pod in pods("spot-drafts") if pod.name == "draft").ports


def test_the_head_may_be_evicted_only_with_fault_tolerance() -> None:
    for overlay in ("gpu", "spot-drafts"):
        tolerant = "gcsFaultToleranceOptions" in rayservice(overlay)["spec"]["rayClusterConfig"]
        guarded = any(b["metadata"]["name"] == "outrider-head" for b in kinds(overlay, "PodDisruptionBudget"))
        assert tolerant
        assert not guarded
    service = next(d for d in kinds("gpu", "Service") if d["metadata"]["name"] == "outrider-redis")
    address = rayservice("gpu")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    assert address == f"outrider-redis:{service['spec']['ports'][0]['port']}"
