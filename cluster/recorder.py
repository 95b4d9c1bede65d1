"""Writes the metric table to Ray, whose agent on each node offers it to Prometheus as `ray_outrider_...`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.telemetry import COMMON_TAGS, Metric

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge, Histogram

logger = logging.getLogger(__name__)


class RayRecorder:
    """A `telemetry.Recorder`. Make one per process, inside Ray (an actor, a replica, a driver after `ray.init`).

    common: a value for each of `telemetry.COMMON_TAGS`; they mark every value from this process.

    Losing a metric must never cost a request: whatever goes wrong is logged once per metric, and that is all.
    """

    def __init__(self, common: Mapping[str, str]) -> None:
        if missing := set(COMMON_TAGS) - set(common):
            raise ValueError(f"no value for the common tags {sorted(missing)}")
        self._common = {tag: str(common[tag]) for tag in COMMON_TAGS}
        self._instruments: dict[str, Counter | Gauge | Histogram] = {}
        self._failed: set[str] = set()

    def add(self, metric: Metric, value: float, **tags: str) -> None:
        if value > 0:  # Ray refuses to count nothing
            self._write("inc", metric, value, tags)

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        self._write("set", metric, value, tags)

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
