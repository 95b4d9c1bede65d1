"""Grafana's HTTP API as its documentation records it, for the requests that provisioning makes; over real HTTP.

From the pages "Folder/Dashboard/Data source/Alerting provisioning HTTP API": paths, bodies, status codes and messages.
It refuses what Grafana refuses (token, unknown folder, name taken, version behind), so that a push that passes here
asks rightly.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "glsa_test"
Answer = tuple[int, dict[str, Any]]


class Grafana:
    """The state behind the API. `prefix` is the path it is served below ("" or "/grafana")."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.folders: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.broken = False

    def answer(self, method: str, path: str, body: Any, authorization: str | None) -> Answer:
        self.requests.append(f"{method} {path}")
        if self.broken:
            return 502, {"message": "Bad Gateway"}
        if authorization != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key"}
        base = f"{self.prefix}/api/"
        return self._route(method, path.removeprefix(base).split("/") if path.startswith(base) else [], body)

    def _route(self, method: str, parts: list[str], body: Any) -> Answer:
        answer: Answer = (404, {"message": "Not found"})
        match method, parts:
            case "GET", ["folders", uid]:
                answer = self._found(self.folders, uid, "folder not found")
            case "POST", ["folders"]:
                answer = self._add_folder(body)
            case "GET", ["datasources", "uid", uid]:
                answer = self._found(self.sources, uid, "Data source not found")
            case "POST", ["datasources"]:
                answer = self._add_source(body)
            case "PUT", ["datasources", "uid", uid]:
                answer = self._update_source(uid, body)
            case "GET", ["dashboards", "uid", uid]:
                answer = self._found(self.dashboards, uid, "Dashboard not found")
            case "POST", ["dashboards", "db"]:
                answer = self._save_dashboard(body)
            case "GET", ["v1", "provisioning", "folder", folder, "rule-groups", name]:
                answer = self._found(self.groups, f"{folder}/{name}", "")
            case "PUT", ["v1", "provisioning", "folder", folder, "rule-groups", name]:
                answer = self._save_rules(folder, name, body)
        return answer

    def _found(self, things: dict[str, dict[str, Any]], uid: str, otherwise: str) -> Answer:
        return (200, things[uid]) if uid in things else (404, {"message": otherwise})

    def _add_folder(self, body: Any) -> Answer:
        if not body.get("title"):
            return 400, {"message": "folder title cannot be empty"}
        if body["uid"] in self.folders:
            return 409, {"message": "a folder with the same uid already exists"}
        self.folders[body["uid"]] = {
            "id": len(self.folders) + 1,
            "uid": body["uid"],
            "title": body["title"],
            "url": f"/dashboards/f/{body['uid']}/{body['title'].lower()}",
            "version": 1,
        }
        return 200, self.folders[body["uid"]]

    def _add_source(self, body: Any) -> Answer:
        if any(source["name"] == body["name"] for source in self.sources.values()):
            return 409, {"message": "data source with the same name already exists"}
        source = {"id": len(self.sources) + 1, "orgId": 1, "isDefault": False, "readOnly": False, "version": 1, **body}
        self.sources[body["uid"]] = source
        return 200, {"datasource": source, "id": source["id"], "message": "Datasource added", "name": body["name"]}

    def _update_source(self, uid: str, body: Any) -> Answer:
        if uid not in self.sources:
            return 404, {"message": "Data source not found"}
        if self.sources[uid]["readOnly"]:
            return 403, {"message": "Cannot update read-only data source"}
        self.sources[uid] = {**self.sources[uid], **body, "version": self.sources[uid]["version"] + 1}
        return 200, {"datasource": self.sources[uid], "message": "Datasource updated", "name": body["name"]}

    def _save_rules(self, folder: str, name: str, body: Any) -> Answer:
        """Rules are checked one by one, and kept with what Grafana adds to them."""
        if folder not in self.folders:
            return 400, {"message": "folder does not exist"}
        kept = []
        for rule in body["rules"]:
            if not {"title", "condition", "data", "for", "noDataState", "execErrState"} <= set(rule):
                return 400, {"message": "invalid alert rule"}
            if rule["condition"] not in [query["refId"] for query in rule["data"]]:
                return 400, {"message": f"condition {rule['condition']} does not exist"}
            for query in rule["data"]:
                if query["datasourceUid"] not in {*self.sources, "__expr__"}:
                    return 400, {"message": "data source not found"}
            if len(rule["uid"]) > 40 or not re.fullmatch(r"(\d+[smhd])+", rule["for"]):
                return 400, {"message": "invalid alert rule"}
            data = [
                {**query, "queryType": "", "model": {"intervalMs": 1000, "maxDataPoints": 43200, **query["model"]}}
                for query in rule["data"]
            ]
            more = {"id": len(kept) + 1, "orgID": 1, "updated": "2026-01-01T00:00:00Z", "provenance": "api"}
            kept.append({**rule, **more, "data": data, "isPaused": False})
        self.groups[f"{folder}/{name}"] = {**body, "rules": kept}
        return 200, self.groups[f"{folder}/{name}"]

    def _save_dashboard(self, body: Any) -> Answer:
        model = body["dashboard"]
        if not model.get("title"):
            return 400, {"message": "Dashboard title cannot be empty"}
        if len(model["uid"]) > 40:
            return 400, {"message": "uid too long, max 40 characters"}
        if body.get("folderUid") not in self.folders:
            return 400, {"message": "folder not found"}
        present = self.dashboards.get(model["uid"])
        if present is not None and not body.get("overwrite"):
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        number = present["dashboard"]["id"] if present else len(self.dashboards) + 1
        version = present["dashboard"]["version"] + 1 if present else 1
        url = f"{self.prefix}/d/{model['uid']}/{model['title'].lower().replace(': ', '-').replace(' ', '-')}"
        self.dashboards[model["uid"]] = {
            "dashboard": {**model, "id": number, "version": version},
            "meta": {"folderUid": body["folderUid"], "url": url, "version": version, "provisioned": False},
        }
        return 200, {"id": number, "uid": model["uid"], "url": url, "status": "success", "version": version}


@contextlib.contextmanager
def served(grafana: Grafana) -> Iterator[str]:
    """Serve it on a free port of 127.0.0.1; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            text = self.rfile.read(length)
            body = json.loads(text) if text else None
            status, reply = grafana.answer(self.command, self.path, body, self.headers.get("authorization"))
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _do

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{grafana.prefix}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
