"""Every custom resource against the operators' own definitions, which are not kept here: `make test-crds CRDS=...`.

CRDS names files of CustomResourceDefinitions; k8s/README.md says where they come from. Unknown keys are refused, which
the API server would drop silently.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from built import OVERLAYS, build
from test_schemas import CUSTOM

pytestmark = pytest.mark.skipif(not os.environ.get("CRDS"), reason="CRDS names no files")


def definitions() -> list[tuple[str, str, dict[str, Any]]]:
    """File, kind and schema of each version of each definition that the manifests use."""
    found = []
    for name in os.environ.get("CRDS", "").split():
        for document in yaml.safe_load_all(Path(name).read_text()):
            kind = document["spec"]["names"]["kind"] if document else ""
            if kind in CUSTOM:
                found += [(name, kind, v["schema"]["openAPIV3Schema"]) for v in document["spec"]["versions"]
                          if v["served"] and v["name"] == "v1"]  # fmt: skip
    return found


def strict(schema: Any) -> Any:
    """As JSON Schema that refuses unknown keys, with Kubernetes' own words translated."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    changed = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        changed["additionalProperties"] = False
    return changed


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Without a check of the schema itself: its patterns are Go's."""
    changed = strict(schema)
    changed["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return jsonschema.Draft202012Validator(changed)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_custom_resources(overlay: str) -> None:
    known = definitions()
    documents = [document for document in build(overlay) if document["kind"] in CUSTOM]
    assert {document["kind"] for document in documents} <= {kind for _, kind, _ in known}
    problems = [
        f"{name}: {error.json_path}: {error.message}"
        for name, kind, schema in known
        for document in documents
        if document["kind"] == kind
        for error in validator(schema).iter_errors(document)
    ]
    assert problems == []


@pytest.mark.parametrize("kind", sorted(CUSTOM))
def test_they_refuse_unknown_keys(kind: str) -> None:
    documents = [document for overlay in OVERLAYS for document in build(overlay) if document["kind"] == kind]
    for _, _, schema in (entry for entry in definitions() if entry[1] == kind):
        spoilt = {**documents[0], "spec": {**documents[0]["spec"], "misspelt": 1}}
        assert ["'misspelt'" in error.message for error in validator(schema).iter_errors(spoilt)] == [True]
