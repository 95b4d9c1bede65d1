"""Writes the metric table to Ray, whose agent on each node offers it to Prometheus as `ray_outrider_...`."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.telemetry import COMMON_TAGS, Metric

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge, Histogram

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Ray forgets a gauge that is not set again within two of its report intervals (10 s each, 1 s at least)."""


class RayRecorder:
    """A `telemetry.Recorder`. Make one per process, inside Ray (an actor, a replica, a driver after `ray.init`).

    common: a value for each of `telemetry.COMMON_TAGS`; they mark every value from this process.

    Losing a metric must never cost a request: whatever goes wrong is logged once per metric, and that is all.
    A gauge keeps its value until it is set again, which takes a thread; it starts with the first gauge and ends with
    the recorder. Until then the recorder can be pickled, so that it can be made where an actor is placed.
    """

    def __init__(self, common: Mapping[str, str]) -> None:
        if missing := set(COMMON_TAGS) - set(common):
            raise ValueError(f"no value for the common tags {sorted(missing)}")
        self._common = {tag: str(common[tag]) for tag in COMMON_TAGS}
        self._instruments: dict[str, Counter | Gauge | Histogram] = {}
        self._failed: set[str] = set()
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Metric, float]] = {}
        self._refreshing = False

    def add(self, metric: Metric, value: float, **tags: str) -> None:
        if value > 0:  # Ray refuses to count nothing
            self._write("inc", metric, value, tags)

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        self._gauges[metric.name, tuple(sorted(tags.items()))] = metric, value
        self._write("set", metric, value, tags)
        if not self._refreshing:
            self._refreshing = True
            threading.Thread(target=_refresh, args=(weakref.ref(self),), name="gauges", daemon=True).start()

    def observe(self, metric: Metric, value: float, **tags: str) -> None:
        self._write("observe", metric, value, tags)

    def _write(self, method: str, metric: Metric, value: float, tags: dict[str, str]) -> None:
        if metric.name in self._failed:
            return
        try:
            instrument = self._instruments.get(metric.name)
            if instrument is None:
                instrument = self._instruments[metric.name] = self._make(metric)
            getattr(instrument, method)(float(value), tags=tags or None)
        except Exception as error:
            self._failed.add(metric.name)
            logger.warning("metric %s is no longer recorded: %s", metric.name, error)

    def refresh(self) -> None:
        """Set every gauge again to the value it has."""
        for (_, tags), (metric, value) in list(self._gauges.items()):
            self._write("set", metric, value, dict(tags))

    def _make(self, metric: Metric) -> Any:
        from ray.util.metrics import Counter, Gauge, Histogram

        keys = tuple(dict.fromkeys((*COMMON_TAGS, *metric.tags)))
        instrument: Counter | Gauge | Histogram
        match metric.kind:
            case "counter":
                instrument = Counter(metric.name, metric.description, keys)
            case "gauge":
                instrument = Gauge(metric.name, metric.description, keys)
            case "histogram":
                instrument = Histogram(metric.name, metric.description, list(metric.boundaries), keys)
        instrument.set_default_tags(self._common)
        return instrument


def _refresh(recorder: weakref.ref[RayRecorder]) -> None:
    while (alive := recorder()) is not None:
        alive.refresh()
        del alive  # this thread must not be what keeps it
        time.sleep(REFRESH_S)
