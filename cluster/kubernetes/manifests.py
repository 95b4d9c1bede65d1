"""Renders a deployment config as KubeRay's RayService, so that replicas, GPUs and bounds are said once.

Pure: documents in, documents out. The template (base/rayservice.yaml) says how pods look; the config says how
many there are, what each holds and what runs on them. Where the pods go (node selectors, spot) is an overlay's say.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from actors.errors import ConfigError
from cluster.config.deployment import DeploymentConfig, TargetTier, Tier, load_config

Document = dict[str, Any]

BASE = Path(__file__).resolve().parent / "base"
"""The kustomize base, which is package data; k8s/base of a checkout leads here."""
TEMPLATE = BASE / "rayservice.yaml"
IMPORT_PATH = "deployments.app:build"
COMPONENT = "app.kubernetes.io/component"
"""Label of the pods and of the Ray nodes in them: which part of the application runs there."""
ACCELERATOR = "ray.io/accelerator-type"
GPU = "nvidia.com/gpu"
VERSION = "outrider/serve-config"
"""Annotation of the head's pod: a digest of `serveConfigV2`.

KubeRay puts a change of `serveConfigV2` alone into the cluster that is answering, whose old replicas go before the new
ones have shown that they come up. A change of a pod template gets a cluster of its own, which takes over when its
application runs: so every version has one.
"""
OVERHEAD_GIB = 4
"""Memory of a pod beside its replicas': raylet, agents and the object store."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class PodShape:
    """How many GPUs a pod of a tier has; None takes what one replica needs.

    Fewer than a replica needs spreads a tensor-parallel group over several pods, more puts several replicas in one.
    """

    target_gpus: int | None = None
    draft_gpus: int | None = None


def rayservice(config: DeploymentConfig, template: Document, shape: PodShape = PodShape()) -> Document:
    """The whole RayService of `config`. Raises ConfigError where the pods asked for cannot hold the replicas."""
    document = copy.deepcopy(template)
    spec = document["spec"]
    spec["serveConfigV2"] = text = yaml.safe_dump(serve_config(config), sort_keys=False)
    spec["rayClusterDeletionDelaySeconds"] = math.ceil(config.orchestrator.settings.request_timeout_s) + 60
    spec["serveService"]["spec"]["ports"][0]["port"] = config.ingress.port
    cluster = spec["rayClusterConfig"]
    digest = f"sha256-{hashlib.sha256(text.encode()).hexdigest()[:16]}"  # with digits alone YAML might read a number
    cluster["headGroupSpec"]["template"]["metadata"]["annotations"] = {VERSION: digest}
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for group in (cluster["headGroupSpec"], groups["front"]):
        for port in _container(group)["ports"]:
            if port["name"] == "serve":
                port["containerPort"] = config.ingress.port
    _bounds(groups["front"], *(max(config.ingress.replicas, config.orchestrator.replicas),) * 2)
    _size(groups["target"], config.target, config.target.tensor_parallel_size, shape.target_gpus, "target")
    if config.draft.kind == "none":
        cluster["workerGroupSpecs"].remove(groups["draft"])
    else:
        _size(groups["draft"], config.draft, 1, shape.draft_gpus, "draft")
    return document


def serve_config(config: DeploymentConfig) -> Document:
    """What `serveConfigV2` holds: one application, built from the config with every part held to its own pods."""
    args = config.model_dump(mode="json", exclude_unset=True)
    target, draft, front = {COMPONENT: "target"}, {COMPONENT: "draft"}, {COMPONENT: "front"}
    _put(args, "target", "resources", "labels", config.target.resources.labels | target)
    if config.draft.kind != "none":
        _put(args, "draft", "resources", "labels", config.draft.resources.labels | draft)
    _put(args, "ingress", "host", "0.0.0.0")
    _put(args, "ingress", "labels", config.ingress.labels | front)
    _put(args, "orchestrator", "labels", config.orchestrator.labels | front)
    load_config(args)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": config.ingress.port},
        "logging_config": {"encoding": "JSON"},
        "applications": [
            {
                "name": config.name,
                "route_prefix": config.ingress.route_prefix,
                "import_path": IMPORT_PATH,
                "args": args,
            }
        ],
    }


def merge_patch(base: Any, wanted: Any) -> Any:
    """What turns `base` into `wanted` as a JSON merge patch (RFC 7396), the form kustomize gives to patches of
    kinds whose lists have no known keys: maps are merged, lists are replaced, null removes.
    """
    if not isinstance(base, Mapping) or not isinstance(wanted, Mapping):
        return wanted
    changed = {key: merge_patch(base.get(key), value) for key, value in wanted.items() if base.get(key) != value}
    return changed | {key: None for key in base if key not in wanted}


def overlay_patch(config: DeploymentConfig, template: Document, shape: PodShape = PodShape()) -> Document:
    """`rayservice` as a patch of the template, with the names by which kustomize finds what to patch."""
    patch: Document = merge_patch(template, rayservice(config, template, shape))
    return {
        "apiVersion": template["apiVersion"],
        "kind": template["kind"],
        "metadata": {"name": template["metadata"]["name"]},
        **patch,
    }


def load_template(path: Path = TEMPLATE) -> Document:
    """Read the template. Raises ConfigError when it is not there."""
    try:
        document: Document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return document


class _Dumper(yaml.SafeDumper):
    """Block style for texts of several lines, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(document: Document) -> str:
    """YAML as a person would read it."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


def _size(group: Document, tier: Tier, ranks: int, gpus_per_pod: int | None, name: str) -> None:
    """Set a group's pods: how many, and what each holds.

    ranks: workers of one replica, each of which takes `tier.resources`.
    """
    scaling = tier.autoscaling
    low, high = (scaling.min_replicas, scaling.max_replicas) if scaling else (tier.replicas, tier.replicas)
    needed = tier.resources.num_gpus * ranks
    if gpus_per_pod is None:
        gpus_per_pod = math.ceil(needed)
    if needed and not gpus_per_pod:
        raise ConfigError(f"pods of the {name} group have no GPUs, but a replica takes {needed:g}")
    if needed and gpus_per_pod < tier.resources.num_gpus:
        each = tier.resources.num_gpus
        raise ConfigError(f"a worker of the {name} group takes {each:g} GPUs, a pod has {gpus_per_pod}")
    if isinstance(tier, TargetTier) and tier.engine == "vllm" and gpus_per_pod < needed:
        raise ConfigError(f"vLLM holds its tensor-parallel group in one pod: give target pods {needed:g} GPUs")
    workers = ranks if not needed else min(ranks, math.floor(gpus_per_pod / tier.resources.num_gpus))
    pods = math.ceil(ranks / workers)
    replicas = math.floor(gpus_per_pod / needed) if needed and pods == 1 else 1
    _bounds(group, math.ceil(low / replicas) * pods, max(1, math.ceil(high / replicas) * pods))
    # One more CPU per replica than its workers take: the Serve replica that owns them.
    cpus = math.ceil(replicas * (workers * tier.resources.num_cpus + 1))
    group["resources"] = {"CPU": str(cpus)}
    container = _container(group)
    container["resources"]["requests"]["cpu"] = str(cpus)
    if tier.resources.memory_gib:
        used = replicas * workers * tier.resources.memory_gib
        group["resources"]["memory"] = str(math.ceil(used * _GIB))
        memory = f"{math.ceil(used + OVERHEAD_GIB)}Gi"
        container["resources"]["requests"]["memory"] = container["resources"]["limits"]["memory"] = memory
    if gpus_per_pod:
        group["resources"]["GPU"] = str(gpus_per_pod)
        container["resources"]["requests"][GPU] = container["resources"]["limits"][GPU] = str(gpus_per_pod)
        group["template"]["spec"]["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    group["labels"] = {**tier.resources.labels, COMPONENT: name}
    if tier.resources.accelerator_type:
        # Ray finds the type by itself on a running node; the autoscaler must know it of a group that has no pod yet.
        group["labels"][ACCELERATOR] = tier.resources.accelerator_type
        group["resources"][f"accelerator_type:{tier.resources.accelerator_type}"] = "1"


def _bounds(group: Document, low: int, high: int) -> None:
    group["replicas"], group["minReplicas"], group["maxReplicas"] = low, low, high


def _container(group: Document) -> Document:
    container: Document = group["template"]["spec"]["containers"][0]
    return container


def _put(tree: Document, *path: Any) -> None:
    """Set the last element of `path` at the keys before it."""
    *keys, last, value = path
    for key in keys:
        tree = tree.setdefault(key, {})
    tree[last] = value
