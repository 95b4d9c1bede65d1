"""The one table of metric names, and the protocol of what records them.

The parts in this folder only know `Recorder`; what writes to Ray's metrics is handed in by the deployment, so that
tests and the simulator can count without a cluster. Names are exported by Ray as `ray_outrider_...`; counters get
`_total` there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. Times are in seconds. `tags` bounds the label names; values must be few."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    tags: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

PROPOSED = Metric("outrider_proposed_tokens", "counter", "Draft tokens that a target pass verified", ("rule",))
ACCEPTED = Metric("outrider_accepted_tokens", "counter", "Draft tokens that were accepted", ("rule",))
COMMITTED = Metric("outrider_committed_tokens", "counter", "Tokens committed by target passes")
EMITTED = Metric("outrider_emitted_tokens", "counter", "Tokens delivered to clients, as in usage")
PASSES = Metric("outrider_passes", "counter", "Target passes")
POSITION_PROPOSED = Metric(
    "outrider_position_proposed", "counter", "Verified draft tokens by place in block", ("place",)
)
POSITION_ACCEPTED = Metric(
    "outrider_position_accepted", "counter", "Accepted draft tokens by place in block", ("place",)
)
PASS_SECONDS = Metric("outrider_pass_seconds", "histogram", "Duration of one target pass", (), _LATENCY)
DRAFT_STEP_SECONDS = Metric("outrider_draft_step_seconds", "histogram", "Duration of one draft step", (), _LATENCY)
QUEUE = Metric("outrider_queue_length", "gauge", "Sequences waiting for a slot", ("tier",))
ACTIVE = Metric("outrider_active_sequences", "gauge", "Sequences holding a slot", ("tier",))
STARVED = Metric("outrider_starved_rows", "counter", "Rows decoded plainly because no proposal was ready")
TTFT = Metric("outrider_time_to_first_token_seconds", "histogram", "From request to first token", (), _LATENCY)
ITL = Metric("outrider_inter_token_seconds", "histogram", "Between tokens of one answer", (), _LATENCY)
REQUESTS = Metric("outrider_requests", "counter", "Finished requests", ("outcome",))

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class Recorder(Protocol):
    """Takes values for metrics of the table. Must be cheap and must never raise."""

    def add(self, metric: Metric, value: float, **tags: str) -> None: ...

    def set(self, metric: Metric, value: float, **tags: str) -> None: ...

    def observe(self, metric: Metric, value: float, **tags: str) -> None: ...


class MemoryRecorder:
    """Keeps sums, last values and samples in memory: for tests, the simulator and `outrider status`."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.counts: dict[tuple[str, tuple[tuple[str, str], ...]], int] = defaultdict(int)

    def add(self, metric: Metric, value: float, **tags: str) -> None:
        self.sums[metric.name, tuple(sorted(tags.items()))] += value

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        self.values[metric.name, tuple(sorted(tags.items()))] = value

    def observe(self, metric: Metric, value: float, **tags: str) -> None:
        key = metric.name, tuple(sorted(tags.items()))
        self.sums[key] += value
        self.counts[key] += 1

    def total(self, metric: Metric) -> float:
        """Sum over all tags."""
        return sum(value for (name, _), value in self.sums.items() if name == metric.name)
