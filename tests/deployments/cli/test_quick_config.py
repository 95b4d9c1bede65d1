"""`outrider serve MODEL`: what the options come to, and the file that is written."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
import yaml

from actors.errors import ConfigError
from cluster.config.deployment import load_config
from deployments.cli.quick_config import changed, default_path, is_file, settings_of, write
from deployments.ingress.auth import read_keys


def test_a_model_and_a_draft(tmp_path: Path) -> None:
    raw = settings_of("org/large", "org/small", None, ["target.settings.context=8192", "target.engine=vllm"])
    config = write(tmp_path / "a" / "config.yaml", raw, None)
    assert config.model_id == "org/large"
    assert (config.target.model, config.target.engine, config.target.settings.context) == ("org/large", "vllm", 8192)
    assert (config.draft.kind, config.draft.model, config.draft.settings.context) == ("model", "org/small", 8192)
    assert config == load_config(tmp_path / "a" / "config.yaml")
    assert config.ingress.keys_file is None


@pytest.mark.parametrize(
    ("model", "draft", "kind", "engine"),
    [
        ("org/large", None, "prompt_lookup", "transformers"),
        ("org/large", "none", "none", "transformers"),
        ("demo:smollm2-135m", "demo:draft", "model", "transformers"),
        ("emulated:h100-70b", "emulated:l4-1b", "emulated", "emulated"),
        ("emulated:h100-70b", None, "none", "emulated"),
    ],
)
def test_kinds_of_drafts(model: str, draft: str | None, kind: str, engine: str) -> None:
    config = load_config(settings_of(model, draft, None, []))
    assert (config.draft.kind, config.target.engine) == (kind, engine)


def test_a_folder_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").mkdir()
    monkeypatch.chdir(tmp_path)
    raw = settings_of("./large", None, None, [])
    assert (raw["model_id"], raw["target"]["model"]) == ("large", str(tmp_path / "large"))
    assert settings_of("./large", None, "mine", [])["model_id"] == "mine"
    assert not is_file("./large")


@pytest.mark.parametrize(("reference", "file"), [("demo", True), ("my.yaml", True), ("org/model", False)])
def test_files_and_models(reference: str, file: bool) -> None:
    assert is_file(reference) is file


def test_a_key_is_kept_as_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = write(path, settings_of("org/large", None, None, []), "secret-key")
    assert config.ingress.keys_file == str(tmp_path / "config.keys.yaml")
    keys = tmp_path / "config.keys.yaml"
    (tenant,) = read_keys(keys)
    assert tenant.sha256 == hashlib.sha256(b"secret-key").hexdigest()
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert "secret-key" not in keys.read_text() + path.read_text()


@pytest.mark.filterwarnings("ignore")  # of Ray's own models
def test_what_is_written_is_what_serve_deploy_takes(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    raw = settings_of("org/large", None, None, ["ingress.port=9001", "ingress.route_prefix=/a", "name=mine"])
    write(tmp_path / "c.yaml", raw, None)
    schema = ServeDeploySchema.model_validate(yaml.safe_load((tmp_path / "c.yaml").read_text()))
    (application,) = schema.applications
    assert (application.name, application.route_prefix) == ("mine", "/a")
    assert application.import_path == "deployments.app:build"
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", 9001)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("target.settings.slots", "KEY=VALUE"),
        ("a..b=1", "KEY=VALUE"),
        ("target.settings.slot=8", "target.settings.slot: there is no such setting; did you mean slots?"),
        ("target.model.name=8", "model is a value"),
        ("target.settings.slots=[", "is not YAML"),
        ("target.settings.slots=many", "target.settings.slots"),
    ],
)
def test_changes_that_cannot_be(tmp_path: Path, change: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        write(tmp_path / "c.yaml", settings_of("org/large", None, None, [change]), None)
    assert told in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_can_be_changed_too() -> None:
    config = load_config({"target": {"settings": {"slots": 4}}})
    got = changed(config, ["target.settings.slots=9", "ingress.cors_origins=[a]"])
    assert (got.target.settings.slots, got.ingress.cors_origins) == (9, ("a",))
    assert changed(config, []) == config


def test_a_file_per_model_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    raw = settings_of("org/large", None, None, [])
    assert default_path(raw) == Path("/state/outrider/serve/org--large-8000.yaml")
    assert default_path(raw | {"ingress": {"port": 9}}).name == "org--large-9.yaml"
