"""Puts the dashboards into a Grafana over its HTTP API: folder, data source, dashboards, alerts; safe to repeat.

The one place that imports `grafana_api` (package grafana-api, in the extra `grafana`). Its last release is of 2020
and its wheel leaves a stray top-level package `test` behind, hence the extra of its own and this narrow interface.
Eight requests are all that is used; should the package fail, `httpx` replaces it behind `Transport` in as many lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from actors.errors import ConfigError, OutriderError
from cluster.observability.grafana.managed import rule_group

FOLDER_UID = "outrider"
FOLDER_TITLE = "Outrider"
SOURCE_UID = "outrider-prometheus"
SOURCE_NAME = "Outrider Prometheus"
Model = dict[str, Any]


class GrafanaError(OutriderError):
    """Grafana could not be reached, or refused; the message holds what it said."""


class MissingError(GrafanaError):
    """Grafana has no such thing (404)."""


class Transport(Protocol):
    """Sends one request and returns the JSON answer. Raises MissingError for 404, GrafanaError for the rest."""

    def __call__(self, method: str, path: str, body: Model | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Pushed:
    """What `push` did. `unchanged` counts dashboards that were there already as they are."""

    folder_created: bool
    source: str
    written: int
    unchanged: int
    urls: tuple[str, ...]
    alerts: str = "left alone"


def connect(url: str, token: str, timeout_s: float = 10.0, verify: bool = True) -> Transport:
    """A transport to `url` (scheme, host, port, and a path if Grafana is below one) with a service account's token.

    Raises ConfigError for an unusable address or where the extra is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"'{url}' is not an http(s) address")
    if not token:
        raise ConfigError("no token: make a service account with the Admin role in Grafana, and give its token")
    try:
        import requests
        from grafana_api.grafana_api import GrafanaAPI, GrafanaClientError, GrafanaException
    except ImportError as error:
        raise ConfigError("pushing to Grafana needs the extra: pip install 'outrider[grafana]'") from error
    prefix = parts.path.strip("/")
    api = GrafanaAPI(
        token,
        host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
        port=parts.port,
        url_path_prefix=f"{prefix}/" if prefix else "",
        protocol=parts.scheme,
        verify=verify,
        timeout=timeout_s,
    )

    def send(method: str, path: str, body: Model | None = None) -> Any:
        try:
            return getattr(api, method)(path, json=body)
        except GrafanaClientError as error:
            kind = MissingError if error.status_code == 404 else GrafanaError
            raise kind(f"{method} {path}: {error.message}") from error
        except GrafanaException as error:
            raise GrafanaError(f"{method} {path}: {error.message}") from error
        except (requests.RequestException, ValueError) as error:  # ValueError: the answer is no JSON
            raise GrafanaError(f"{method} {path}: {error}") from error

    return send


def push(
    send: Transport, dashboards: tuple[Model, ...], prometheus_url: str | None = None, alerts: bool = False
) -> Pushed:
    """Make the folder if there is none, make or correct the data source, and write the dashboards that differ.

    prometheus_url: where Grafana finds Prometheus; None leaves the data sources as they are.
    alerts: also the alert rules, over the data source that an address has made (now or before).
    """
    created = _ensure_folder(send)
    source = _ensure_source(send, prometheus_url) if prometheus_url is not None else "left alone"
    written, urls = 0, []
    for model in dashboards:
        present = _present(send, model["uid"])
        if present is not None and _same(present, model):
            urls.append(present["meta"]["url"])
            continue
        body = {"dashboard": {**model, "id": None}, "folderUid": FOLDER_UID, "overwrite": True}
        urls.append(send("POST", "/dashboards/db", body)["url"])
        written += 1
    ruled = _ensure_alerts(send) if alerts else "left alone"
    return Pushed(created, source, written, len(dashboards) - written, tuple(urls), ruled)


def _ensure_folder(send: Transport) -> bool:
    try:
        send("GET", f"/folders/{FOLDER_UID}")
    except MissingError:
        send("POST", "/folders", {"uid": FOLDER_UID, "title": FOLDER_TITLE})
        return True
    return False


def _ensure_source(send: Transport, url: str) -> str:
    wanted = {"uid": SOURCE_UID, "name": SOURCE_NAME, "type": "prometheus", "access": "proxy", "url": url}
    try:
        present = send("GET", f"/datasources/uid/{quote(SOURCE_UID)}")
    except MissingError:
        send("POST", "/datasources", wanted)
        return "created"
    if all(present.get(key) == value for key, value in wanted.items()):
        return "unchanged"
    send("PUT", f"/datasources/uid/{quote(SOURCE_UID)}", {**present, **wanted})
    return "updated"


def _ensure_alerts(send: Transport) -> str:
    send("GET", f"/datasources/uid/{quote(SOURCE_UID)}")  # rules over a source that is not there would fire in vain
    wanted = rule_group(FOLDER_UID, SOURCE_UID)
    path = f"/v1/provisioning/folder/{FOLDER_UID}/rule-groups/{wanted['title']}"
    try:
        present = send("GET", path)
    except MissingError:
        present = None
    if present is not None and _covers(present, wanted):
        return "unchanged"
    send("PUT", path, wanted)
    return "created" if present is None else "updated"


def _covers(present: Any, wanted: Any) -> bool:
    """Is all that is wanted there? Grafana adds ids, times and defaults of its own to what it is given."""
    if isinstance(wanted, dict):
        return isinstance(present, dict) and all(_covers(present.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(present, list)
            and len(present) == len(wanted)
            and all(_covers(have, want) for have, want in zip(present, wanted, strict=True))
        )
    return bool(present == wanted)


def _present(send: Transport, uid: str) -> Model | None:
    try:
        found: Model = send("GET", f"/dashboards/uid/{uid}")
    except MissingError:
        return None
    return found


def _same(present: Model, wanted: Model) -> bool:
    """Grafana adds an id and a version; a dashboard moved to another folder is moved back."""
    stored = {key: value for key, value in present["dashboard"].items() if key not in ("id", "version")}
    return stored == wanted and present["meta"].get("folderUid") == FOLDER_UID
