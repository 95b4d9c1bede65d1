"""The live page in headless Chromium, over a reciting service. Skipped where there is none, except in CI."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tiny import Reciter, byte_codec
from websockets.sync.client import ClientConnection, connect

from deployments.ingress.http_app import http_app
from deployments.ingress.service import Served
from deployments.runtime.local import free_port

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="no Chromium here"),
    pytest.mark.filterwarnings("ignore:.*websockets.*:DeprecationWarning"),
]


class Tab:
    """One tab, over the DevTools protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def value(self, expression: str) -> Any:
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + 30
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[Tab, Reciter]]:
    codec = byte_codec()
    reciter = Reciter(codec, says="Hello wörld, <b>not bold</b> & so on.")
    port = free_port()
    app = http_app(reciter, codec, Served("tiny", context=512))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none"))
    serving = threading.Thread(target=server.run)
    serving.start()
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={tmp_path}",
        "--window-size=420,900", "about:blank",
    ]  # fmt: skip
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_first_tab(tmp_path), max_size=None) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                tab.call(f"{domain}.enable")
            tab.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
            tab.until("typeof model !== 'undefined' && model === 'tiny'")
            yield tab, reciter
    finally:
        browser.terminate()
        browser.wait(20)
        server.should_exit = True
        serving.join(20)


def _first_tab(profile: Path) -> str:
    import httpx

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            port = (profile / "DevToolsActivePort").read_text().splitlines()[0]
            tabs = httpx.get(f"http://127.0.0.1:{port}/json/list").json()
            return next(str(tab["webSocketDebuggerUrl"]) for tab in tabs if tab["type"] == "page")
        except (OSError, IndexError, StopIteration, httpx.HTTPError):
            time.sleep(0.1)
    raise AssertionError("Chromium did not start")


def test_generates_side_by_side(page: tuple[Tab, Reciter], tmp_path: Path) -> None:
    tab, reciter = page
    tab.value("document.getElementById('form').requestSubmit()")
    tab.until("document.getElementById('plain-figures').textContent.includes('per pass')")
    for name in ("fast", "plain"):
        spans = f"[...document.querySelectorAll('#{name} span')].map((it) => it.textContent).join('')"
        assert tab.value(spans) == reciter.says  # text, never markup
        struck = f"[...document.querySelectorAll('#{name} s')].map((it) => it.textContent)"
        assert tab.value(struck) == ["<s>"] * tab.value(f"document.querySelectorAll('#{name} .correction').length")
        assert tab.value(f"document.querySelectorAll('#{name} b').length") == 0
    assert tab.value("document.querySelectorAll('#fast .accepted').length") > 0
    assert tab.value("document.querySelectorAll('#fast .correction').length") > 0
    about = tab.value("document.querySelector('#fast span').title")
    assert "accepted" in about
    assert "probability" in about
    assert [r.sampling.speculation for r in reciter.requests] == [True, False]
    tab.until("document.getElementById('fast-figures').textContent.includes('x')")  # over plain decoding
    tab.value("document.querySelector('#fast span').dispatchEvent(new Event('pointerenter'))")
    assert "accepted" in tab.value("document.getElementById('detail').textContent")
    assert tab.value("document.querySelectorAll('#detail i').length") == 5  # the token, and the four best
    ink = "[...document.getElementById('chart').getContext('2d').getImageData(62, 0, 40, 300).data].some((it) => it)"
    assert tab.value(ink)
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")  # fits a phone
    assert tab.value("[...document.querySelectorAll('input, textarea')].every((it) => it.labels.length > 0)")
    tab.until("document.getElementById('state').textContent.includes('no replica')")
    facts = {"running": 3.0, "waiting": 1.0, "slots": 4.0, "kv_share": 0.25, "lookahead": 2.5, "acceptance_rate": 0.71}
    serve = {
        "states": {"RUNNING": 1, "STARTING": 1},
        "status": "UPSCALING",
        "message": "",
        "obstacle": "no GPU is free",
    }
    reciter.tiers = {
        "target": {"replicas": {"t1": {"sequences": 3, **facts}}, "serve": serve},
        "draft": {"replicas": {}, "refused": {"d1": "<i>another</i> vocabulary"}},
    }
    tab.until("document.getElementById('state').textContent.includes('t1')")
    told = tab.value("document.getElementById('state').textContent")
    for text in (
        "3 of 4 slots",
        "25 %",
        "2.5lookahead",
        "71 %accepted",
        "upscaling, 1 running, 1 starting, no GPU is free",
    ):
        assert text in told
    assert "d1 is not used: <i>another</i> vocabulary" in told  # text, never markup
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    picture = base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"])
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    (tmp_path / "page.png").write_bytes(picture)
    assert tab.problems == []


def press(tab: Tab, key: str, modifiers: int = 0) -> None:
    code = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36}[key]
    for kind in ("rawKeyDown", "keyUp"):
        tab.call(
            "Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=modifiers, windowsVirtualKeyCode=code
        )


def test_by_keyboard(page: tuple[Tab, Reciter]) -> None:
    """The prompt has the focus; Ctrl+Enter, which is said, generates; each answer is one stop, with arrows inside."""
    tab, _ = page
    focus = "document.activeElement.id || document.activeElement.textContent"
    assert tab.value(focus) == "prompt"
    assert "Ctrl+Enter" in tab.value("document.getElementById('send-hint').textContent")
    press(tab, "Enter", modifiers=2)
    tab.until("document.getElementById('plain-figures').textContent.includes('per pass')")
    assert tab.value("document.querySelectorAll('.answer span[tabindex=\\'0\\']').length") == 0
    tab.value("document.getElementById('fast').focus()")
    for key, held in (("ArrowRight", "H"), ("ArrowRight", "e"), ("ArrowLeft", "H"), ("End", "."), ("ArrowRight", ".")):
        press(tab, key)
        assert tab.value(focus) == held
        assert f'"{held}"' in tab.value("document.getElementById('detail').textContent")
    press(tab, "Tab")
    assert tab.value(focus) == "plain"
    assert tab.problems == []


def test_figures_are_measured_and_explained(page: tuple[Tab, Reciter]) -> None:
    tab, reciter = page
    facts = {"running": 1.0, "waiting": 0.0, "slots": 4.0, "kv_share": 0.1, "gain": 1.42, "acceptance_length": 1.0}
    reciter.tiers = {"target": {"replicas": {"t1": {"sequences": 1, **facts}}}, "draft": {"replicas": {}}}
    tab.until("document.getElementById('state').textContent.includes('t1')")
    told = tab.value("document.getElementById('state').textContent")
    assert "1.00tokens per pass" in told
    assert "1.42" not in told
    legend = tab.value("document.querySelector('.legend').textContent")
    for word in ("accepted", "rejected", "correction", "bonus", "plain"):
        assert word in legend
    assert tab.value("document.querySelector('link[rel=icon]').href").startswith("data:image/svg+xml")
    assert tab.value("document.getElementById('temperature').placeholder") == "1"
    assert tab.problems == []  # no 404 either


def test_a_temperature_that_is_not_given_is_the_server_s(page: tuple[Tab, Reciter]) -> None:
    tab, reciter = page
    tab.value("document.getElementById('both').checked = false; document.getElementById('form').requestSubmit()")
    tab.until("document.getElementById('fast-figures').textContent.includes('per pass')")
    tab.value("document.getElementById('temperature').value = 0.5; document.getElementById('form').requestSubmit()")
    tab.until("document.getElementById('fast-figures').textContent.includes('per pass') && !running")
    assert ["temperature" in request.sampling.model_fields_set for request in reciter.requests] == [False, True]


def test_says_what_is_wrong(page: tuple[Tab, Reciter]) -> None:
    tab, _ = page
    tab.value("document.getElementById('most').removeAttribute('min')")
    tab.value("document.getElementById('most').value = 0; document.getElementById('form').requestSubmit()")
    tab.until("document.getElementById('detail').textContent.includes('max_tokens')")
    assert not tab.value("document.getElementById('go').disabled")
