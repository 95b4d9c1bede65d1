"""Asks a Prometheus over its HTTP API."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any


def get(url: str, **parameters: str) -> Any:
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=10) as answer:
        return json.load(answer)


def ask(url: str, expression: str) -> list[Any]:
    """The samples of an instant query, as Prometheus answers it."""
    samples: list[Any] = get(f"{url}/api/v1/query", query=expression)["data"]["result"]
    return samples


def value(url: str, expression: str) -> float:
    """The one number that an expression comes to."""
    (sample,) = ask(url, expression)
    return float(sample["value"][1])


def eventually(holds: Callable[[], Any], limit_s: float) -> Any:
    """The first true value of `holds`, asked twice a second; its last value at the limit."""
    deadline = time.monotonic() + limit_s
    while not (result := holds()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return result
