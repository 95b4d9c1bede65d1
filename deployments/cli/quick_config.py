"""`outrider serve MODEL`: a configuration from a model's name and a few options, written down so that it can be edited.

The file is one that `outrider serve` and `serve deploy` take.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from actors.errors import ConfigError
from cluster.config.deployment import DeploymentConfig, load_config

WITHOUT_MODEL = ("none", "prompt_lookup", "suffix")
"""Drafts that are no model: prompt_lookup guesses from the prompt and the answer, suffix from earlier answers too."""
IMPORT_PATH = "deployments.app:build"
Raw = dict[str, Any]


def is_file(reference: str) -> bool:
    """Whether `reference` names a configuration file, and no model: a model is a folder, a hub id, or KIND:NAME."""
    return reference == "demo" or reference.endswith((".yaml", ".yml", ".json")) or Path(reference).is_file()


def settings_of(model: str, draft: str | None, name: str | None, changes: Sequence[str]) -> Raw:
    """The settings of a deployment of `model`.

    draft: a model, `prompt_lookup`, `suffix` or `none`; None: prompt lookup, which fits every model and needs no other.
    name: what clients call the model; None: its hub id, or its folder's name. changes: KEY=VALUE, with dots in the key.
    Raises ConfigError for a change that is none.
    """
    raw: Raw = {
        "model_id": name or (Path(model).resolve().name if Path(model).is_dir() else model.rpartition(":")[2]),
        "target": {"model": _absolute(model)},
        "draft": _draft(model, draft),
    }
    if model.startswith("emulated:"):
        raw["target"]["engine"] = "emulated"
    change(raw, changes)
    context = raw["target"].get("settings", {}).get("context")
    if context is not None and "context" not in raw["draft"].get("settings", {}):
        raw["draft"].setdefault("settings", {})["context"] = context  # a draft must be able to follow
    return raw


def _draft(model: str, draft: str | None) -> Raw:
    if draft is None:
        draft = "none" if model.startswith("emulated:") else "prompt_lookup"
    if draft in WITHOUT_MODEL:
        return {"kind": draft}
    return {"kind": "emulated" if draft.startswith("emulated:") else "model", "model": _absolute(draft)}


def _absolute(reference: str) -> str:
    """Replicas run in folders of their own."""
    return str(Path(reference).resolve()) if Path(reference).is_dir() else reference


def change(raw: Raw, changes: Sequence[str]) -> None:
    """Apply KEY=VALUE to settings; the value is read as YAML. Raises ConfigError for what is no such thing."""
    for text in changes:
        key, sign, value = text.partition("=")
        if not sign or not all(key.split(".")):
            raise ConfigError(f"--set takes KEY=VALUE, for example target.settings.slots=8, not {text!r}")
        *path, last = key.split(".")
        group: Any = raw
        for part in path:
            group = group.setdefault(part, {})
            if not isinstance(group, dict):
                raise ConfigError(f"--set {key}: {part} is a value, and no group of settings")
        try:
            group[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key}: {value!r} is not YAML") from error


def changed(config: DeploymentConfig, changes: Sequence[str]) -> DeploymentConfig:
    """A configuration with KEY=VALUE applied. Raises ConfigError."""
    raw = config.model_dump(mode="json", exclude_unset=True)
    change(raw, changes)
    return load_config(raw)


def write(path: Path, raw: Raw, key: str | None) -> DeploymentConfig:
    """Check the settings, and write them as a file of `serve deploy`; with a key, its hash into a file beside it.

    Returns what the file says. Raises ConfigError.
    """
    if key is not None:
        from deployments.ingress.auth import key_hash

        keys = path.with_suffix(".keys.yaml")
        raw = {**raw, "ingress": {**raw.get("ingress", {}), "keys_file": str(keys.absolute())}}
    config = load_config(raw)
    http = {"host": config.ingress.host, "port": config.ingress.port}
    application = {
        "name": config.name, "route_prefix": config.ingress.route_prefix, "import_path": IMPORT_PATH, "args": raw,
    }  # fmt: skip
    document = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
    text = "# Written by `outrider serve`; edit it, and serve it by its name.\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if key is not None:
            _write_private(keys, f"keys:\n  - {{name: {json.dumps('serve')}, sha256: {key_hash(key)}}}\n")
        path.write_text(text + yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return load_config(path)


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def default_path(raw: Raw) -> Path:
    """Where a configuration is written unless told otherwise: a file per model and port, in the user's state folder."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    port = raw.get("ingress", {}).get("port", DeploymentConfig().ingress.port)
    return state / "outrider" / "serve" / f"{str(raw['model_id']).replace('/', '--')}-{port}.yaml"
