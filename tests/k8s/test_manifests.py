"""Rendering: numbers worked out by hand, and the committed manifests in step with their configs."""

from __future__ import annotations

import copy
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from built import K8S, kustomize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.errors import ConfigError
from cluster.config.deployment import load_config
from cluster.kubernetes import manifests
from cluster.kubernetes.manifests import PodShape
from deployments.cli.kubernetes import app

TEMPLATE = manifests.load_template()
ONE = PodShape()
REAL = {"target": {"model": "org/large", "dtype": "bfloat16"}, "draft": {"model": "org/small", "dtype": "bfloat16"}}


def render(target: dict[str, Any], draft: dict[str, Any], shape: PodShape = ONE, **more: Any) -> Any:
    """The worker groups by name."""
    raw = {"target": {**REAL["target"], **target}, "draft": {**REAL["draft"], **draft}, **more}
    document = manifests.rayservice(load_config(raw), TEMPLATE, shape)
    return {group["groupName"]: group for group in document["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def bounds(group: Any) -> tuple[int, int, int]:
    return group["minReplicas"], group["replicas"], group["maxReplicas"]


def test_base_is_what_its_config_renders() -> None:
    assert manifests.rayservice(load_config(K8S / "base" / "config.yaml"), TEMPLATE) == TEMPLATE


@pytest.mark.parametrize("overlay", ["kind", "gpu"])
def test_overlays_are_what_their_configs_render(overlay: str) -> None:
    committed = yaml.safe_load((K8S / "overlays" / overlay / "rayservice.yaml").read_text())
    config = load_config(K8S / "overlays" / overlay / "config.yaml")
    assert manifests.overlay_patch(config, TEMPLATE) == committed


def test_one_tensor_parallel_group_per_pod() -> None:
    """Four ranks of one GPU and two CPUs: a pod of four GPUs and 4 x 2 + 1 CPUs; a replica is a pod."""
    groups = render(
        {
            "engine": "vllm",
            "tensor_parallel_size": 4,
            "resources": {"num_cpus": 2, "num_gpus": 1, "memory_gib": 40, "accelerator_type": "H100"},
            "autoscaling": {"min_replicas": 2, "max_replicas": 5},
        },
        {},
    )
    target = groups["target"]
    assert bounds(target) == (2, 2, 5)
    assert target["resources"] == {
        "CPU": "9",
        "memory": str(160 * 2**30),
        "GPU": "4",
        "accelerator_type:H100": "1",
    }
    container = target["template"]["spec"]["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "9", "memory": "164Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "164Gi", "nvidia.com/gpu": "4"},
    }
    assert target["labels"] == {"app.kubernetes.io/component": "target", "ray.io/accelerator-type": "H100"}
    assert target["template"]["spec"]["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_a_group_across_pods() -> None:
    """Eight ranks in pods of two GPUs: four pods each, so 1..3 replicas are 4..12 pods of 2 x 1 + 1 CPUs."""
    target = render(
        {
            "tensor_parallel_size": 8,
            "resources": {"num_gpus": 1},
            "autoscaling": {"min_replicas": 1, "max_replicas": 3},
        },
        {},
        PodShape(target_gpus=2),
    )["target"]
    assert bounds(target) == (4, 4, 12)
    assert target["resources"] == {"CPU": "3", "GPU": "2"}


def test_drafts_share_a_gpu() -> None:
    """Half a GPU each: two to a pod, so 3..8 replicas are 2..4 pods of 2 x (1 + 1) CPUs."""
    draft = render({}, {"resources": {"num_gpus": 0.5}, "autoscaling": {"min_replicas": 3, "max_replicas": 8}})["draft"]
    assert bounds(draft) == (2, 2, 4)
    assert draft["resources"] == {"CPU": "4", "GPU": "1"}


def test_several_replicas_in_a_large_pod() -> None:
    draft = render({}, {"resources": {"num_gpus": 1}, "replicas": 5}, PodShape(draft_gpus=4))["draft"]
    assert bounds(draft) == (2, 2, 2)
    assert draft["resources"] == {"CPU": "8", "GPU": "4"}


def test_drafts_may_be_none_for_now_or_for_good() -> None:
    scaled = render({}, {"autoscaling": {"min_replicas": 0, "max_replicas": 2}})["draft"]
    assert bounds(scaled) == (0, 0, 2)
    assert "draft" not in render({}, {"kind": "none"})


def test_front_holds_the_larger_of_its_two_parts() -> None:
    groups = render({}, {}, ingress={"replicas": 2}, orchestrator={"replicas": 3})
    assert bounds(groups["front"]) == (3, 3, 3)


def test_port_and_patience_are_said_once() -> None:
    raw = {**REAL, "ingress": {"port": 9000}, "orchestrator": {"settings": {"request_timeout_s": 90.5}}}
    spec = manifests.rayservice(load_config(raw), TEMPLATE)["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] == 151
    assert spec["serveService"]["spec"]["ports"] == [{"name": "serve", "port": 9000, "targetPort": "serve"}]
    cluster = spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
        ports = group["template"]["spec"]["containers"][0]["ports"]
        assert [port["containerPort"] for port in ports if port["name"] == "serve"] == [9000]
    assert yaml.safe_load(spec["serveConfigV2"])["http_options"]["port"] == 9000


def test_pods_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match="a worker of the draft group takes 2 GPUs, a pod has 1"):
        render({}, {"resources": {"num_gpus": 2}}, PodShape(draft_gpus=1))


def test_vllm_is_not_spread() -> None:
    """Its ranks live in one process group of one Ray actor, which asks for all GPUs in one bundle."""
    target = {"engine": "vllm", "tensor_parallel_size": 4, "resources": {"num_gpus": 1}}
    with pytest.raises(ConfigError, match="give target pods 4 GPUs"):
        render(target, {}, PodShape(target_gpus=2))


@settings(deadline=None)
@given(
    ranks=st.integers(1, 16),
    gpus=st.sampled_from([0.25, 0.5, 1.0]),
    low=st.integers(1, 20),
    spread=st.integers(1, 20),
    per_pod=st.none() | st.integers(1, 8),
)
def test_pods_hold_the_replicas(ranks: int, gpus: float, low: int, spread: int, per_pod: int | None) -> None:
    """Whatever the shape: the GPUs of all pods suffice for the replicas, and no pod fewer would do."""
    target = render(
        {
            "tensor_parallel_size": ranks,
            "resources": {"num_gpus": gpus},
            "autoscaling": {"min_replicas": low, "max_replicas": low + spread},
        },
        {},
        PodShape(target_gpus=per_pod),
    )["target"]
    size = int(target["resources"]["GPU"])
    assert size == (per_pod or math.ceil(ranks * gpus))
    workers_per_pod = math.floor(size / gpus)
    for replicas, count in ((low, target["minReplicas"]), (low + spread, target["maxReplicas"])):
        assert count * workers_per_pod >= replicas * ranks
    assert target["minReplicas"] <= target["replicas"] <= target["maxReplicas"]


documents = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
)


def apply_patch(base: Any, patch: Any) -> Any:
    """RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_patch(result.get(key), value)
    return result


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from("abcd"), documents), st.dictionaries(st.sampled_from("abcd"), documents))
def test_merge_patch(base: Any, wanted: Any) -> None:
    assert apply_patch(base, manifests.merge_patch(base, wanted)) == wanted


class TestCommand:
    def run(self, *args: str) -> Any:
        return CliRunner().invoke(app, ["render", *args])

    def test_to_standard_output(self) -> None:
        result = self.run(str(K8S / "base" / "config.yaml"), "--base", str(K8S / "base"))
        assert result.exit_code == 0
        assert yaml.safe_load(result.stdout) == TEMPLATE

    def test_a_new_overlay_builds(self, tmp_path: Any) -> None:
        overlay = tmp_path / "mine"
        config = str(K8S / "overlays" / "kind" / "config.yaml")
        result = self.run(config, "--overlay", str(overlay), "--base", str(K8S / "base"))
        assert result.exit_code == 0, result.output
        patch = yaml.safe_load((overlay / "rayservice.yaml").read_text())
        assert apply_patch(TEMPLATE, patch) == manifests.rayservice(load_config(config), TEMPLATE)
        (resource,) = yaml.safe_load((overlay / "kustomization.yaml").read_text())["resources"]
        assert (overlay / resource / "rayservice.yaml").resolve() == (K8S / "base" / "rayservice.yaml").resolve()

    def test_outside_a_checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The base is the package's own; an overlay gets a copy of it, so that it can be committed anywhere."""
        config = str((K8S / "overlays" / "kind" / "config.yaml").resolve())
        monkeypatch.chdir(tmp_path)
        assert yaml.safe_load(self.run(config).stdout) == manifests.rayservice(load_config(config), TEMPLATE)
        result = self.run(config, "--overlay", "mine")
        assert result.exit_code == 0, result.output
        assert yaml.safe_load((tmp_path / "mine" / "kustomization.yaml").read_text())["resources"] == ["base"]
        kinds = {document["kind"] for document in kustomize(tmp_path / "mine")}
        assert {"RayService", "NetworkPolicy", "Namespace"} <= kinds

    def test_in_a_checkout_the_overlay_leads_to_its_base(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = str((K8S / "overlays" / "kind" / "config.yaml").resolve())
        (tmp_path / "k8s").mkdir()
        (tmp_path / "k8s" / "base").symlink_to(manifests.BASE)
        monkeypatch.chdir(tmp_path)
        assert self.run(config, "--overlay", "k8s/overlays/mine").exit_code == 0
        written = (tmp_path / "k8s" / "overlays" / "mine" / "kustomization.yaml").read_text()
        assert yaml.safe_load(written)["resources"] == ["../../base"]

    def test_the_runbook_s_overlay_builds(self, tmp_path: Path) -> None:
        """Step 5 as it is written there: a copy of the gpu overlay, with the runbook's lines for kustomization.yaml."""
        mine = tmp_path / "k8s" / "overlays" / "mine"
        shutil.copytree(K8S, tmp_path / "k8s")
        shutil.copytree(K8S / "overlays" / "gpu", mine)
        result = self.run(str(mine / "config.yaml"), "--overlay", str(mine), "--base", str(tmp_path / "k8s" / "base"))
        assert result.exit_code == 0, result.output
        runbook = (K8S / "README.md").read_text()
        (lines,) = re.findall(r"In `kustomization.yaml`:\n\n```yaml\n(.*?)```", runbook, re.DOTALL)
        changes = yaml.safe_load(lines)
        kustomization = yaml.safe_load((mine / "kustomization.yaml").read_text())
        kustomization["images"] = changes["images"]
        kustomization["patches"] += changes["patches"]
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        documents = {(d["kind"], d["metadata"]["name"]): d for d in kustomize(mine)}
        assert documents["PersistentVolumeClaim", "outrider-models"]["spec"]["storageClassName"] == "YOUR-CLASS"
        cluster = documents["RayService", "outrider"]["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert group["template"]["spec"]["containers"][0]["image"] == "REGISTRY/outrider:0.1.0-cuda"

    def test_a_bad_config_is_said_in_one_line(self, tmp_path: Any) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text("target: {modle: x}")
        result = self.run(str(path), "--base", str(K8S / "base"))
        assert result.exit_code == 2
        assert "target.modle" in result.output


def cluster_identity(document: Any) -> Any:
    """What KubeRay compares (GenerateHashWithoutReplicasAndWorkersToDelete, 1.5 to 1.7): a difference means a new
    cluster; without one, `serveConfigV2` goes into the cluster that is answering.
    """
    spec = copy.deepcopy(document["spec"]["rayClusterConfig"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for ignored in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(ignored, None)
        group["template"]["spec"].pop("tolerations", None)
    return spec


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "another"},
        {"rule": "rejection"},
        {"ingress": {"keys_file": "/etc/outrider/keys/keys.yaml"}},
        {"target": {**REAL["target"], "model": "org/broken"}},
        {"target": {**REAL["target"], "autoscaling": {"max_replicas": 3}}},  # bounds of pods alone reach no cluster
        {"draft": {**REAL["draft"], "settings": {"slots": 3}}},
    ],
)
def test_every_version_gets_a_cluster_of_its_own(change: dict[str, Any]) -> None:
    """So one that never becomes ready never touches the one that answers."""
    before, again, after = (
        manifests.rayservice(load_config({**REAL, **more}), TEMPLATE, ONE) for more in ({}, {}, change)
    )
    assert cluster_identity(before) == cluster_identity(again)
    assert cluster_identity(before) != cluster_identity(after)
    assert after["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
