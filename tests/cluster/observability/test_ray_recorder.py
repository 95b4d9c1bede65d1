"""The recorder over Ray's metrics, with Ray's instruments replaced: what is written, kept, and survived."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from typing import Any

import pytest

from actors import telemetry as t
from actors.telemetry import Metric
from cluster.observability import ray_recorder as module
from cluster.observability.ray_recorder import RayRecorder

COMMON = {"application": "a", "tier": "target", "model": "m", "replica": "r"}


class Instrument:
    """Takes what Ray's take, refuses what Ray's refuse, and keeps it."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.written: list[tuple[str, float, dict[str, str]]] = []
        self.refreshed = threading.Event()

    def _note(self, method: str, value: float, tags: dict[str, str] | None) -> None:
        if set(tags or {}) != set(self.metric.tags):
            raise ValueError("tags do not fit")
        self.written.append((method, value, tags or {}))
        if len(self.written) > 1:
            self.refreshed.set()

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        if value <= 0:
            raise ValueError("a counter only grows")
        self._note("inc", value, tags)

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self._note("set", value, tags)

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        self._note("observe", value, tags)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Instrument]:
    instruments: dict[str, Instrument] = {}

    def make(self: RayRecorder, metric: Metric) -> Instrument:
        return instruments.setdefault(metric.name, Instrument(metric))

    monkeypatch.setattr(RayRecorder, "_make", make)
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    return instruments


def test_values_and_tags(made: dict[str, Instrument]) -> None:
    recorder = RayRecorder(COMMON)
    recorder.add(t.PROPOSED, 3, rule="coupled")
    recorder.add(t.PROPOSED, 0, rule="coupled")  # nothing to count
    recorder.observe(t.TTFT, 0.3)
    assert made[t.PROPOSED.name].written == [("inc", 3.0, {"rule": "coupled"})]
    assert made[t.TTFT.name].written == [("observe", 0.3, {})]


def test_a_gauge_set_once_is_set_again(made: dict[str, Instrument]) -> None:
    """Ray forgets it otherwise: a replica that idles would vanish from the dashboards."""
    recorder = RayRecorder(COMMON)
    recorder.set(t.SLOTS, 16)
    assert made[t.SLOTS.name].refreshed.wait(10)
    assert set(map(str, made[t.SLOTS.name].written)) == {str(("set", 16.0, {}))}


def test_errors_cost_one_metric_and_no_request(made: dict[str, Instrument], caplog: Any) -> None:
    recorder = RayRecorder(COMMON)
    recorder.add(t.REQUESTS, 1, wrong="tag")
    recorder.add(t.REQUESTS, 1, outcome="stop")  # no longer recorded
    recorder.add(t.PASSES, 1)
    assert made[t.REQUESTS.name].written == []
    assert made[t.PASSES.name].written == [("inc", 1.0, {})]
    assert caplog.text.count("is no longer recorded") == 1


def test_it_can_be_sent_to_an_actor() -> None:
    sent = pickle.loads(pickle.dumps(RayRecorder(COMMON)))
    assert isinstance(sent, RayRecorder)


def test_its_thread_ends_with_it(made: dict[str, Instrument]) -> None:
    before = set(threading.enumerate())
    recorder = RayRecorder(COMMON)
    recorder.set(t.SLOTS, 16)
    (thread,) = set(threading.enumerate()) - before
    gone = weakref.ref(recorder)
    del recorder
    gc.collect()
    thread.join(10)
    assert gone() is None
    assert not thread.is_alive()


def test_common_tags_are_required() -> None:
    with pytest.raises(ValueError, match="replica"):
        RayRecorder({"application": "a", "tier": "t", "model": "m"})
