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
    """One row of the table. Times are in seconds. `tags` bounds the label names; values must be few.

    What never changes in a process (`COMMON_TAGS`) is bound by the recorder once, not said with each value.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    tags: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


COMMON_TAGS = ("application", "tier", "model", "replica")
"""Bound once per process, so that the parts need not know them. Bounded by the number of replicas."""

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_DURATION = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
_LINK = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)

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
REQUEST_SECONDS = Metric("outrider_request_seconds", "histogram", "From request to last token", (), _DURATION)
PROMPT_TOKENS = Metric("outrider_prompt_tokens", "counter", "Prompt tokens of admitted requests")
REFUSED = Metric("outrider_refused_requests", "counter", "Requests turned away before they began", ("reason",))
HTTP_RESPONSES = Metric("outrider_http_responses", "counter", "HTTP responses begun", ("route", "status"))
MOVES = Metric("outrider_moved_sequences", "counter", "Sequences moved because a replica went", ("tier",))
ACTOR_LOSSES = Metric("outrider_actor_losses", "counter", "Model actors that died or stood still and were replaced")
READY_REPLICAS = Metric("outrider_ready_replicas", "gauge", "Replicas an orchestrator has a link to", ("tier",))
LINK_SECONDS = Metric(
    "outrider_link_seconds", "histogram", "From a batch's sending to its handling at the orchestrator", ("tier",), _LINK
)
QUEUE_SECONDS = Metric("outrider_queue_seconds", "histogram", "Wait of a sequence for a slot", (), _LATENCY)
SLOTS = Metric("outrider_kv_slots", "gauge", "KV slots of the replica")
KV_POSITIONS = Metric("outrider_kv_positions", "gauge", "KV positions of the replica, used or not")
KV_USED = Metric("outrider_kv_used_positions", "gauge", "KV positions that hold a token")
DECIDED_ROWS = Metric("outrider_decided_rows", "counter", "Sequences that a target pass committed tokens for")
SPECULATED_ROWS = Metric("outrider_speculated_rows", "counter", "Sequences whose proposal a target pass verified")
SPECULATION_GAIN = Metric(
    "outrider_speculation_gain",
    "gauge",
    "Tokens per second with the chosen lookahead over those without, as the lookahead controller estimates",
)
PASS_PART_SECONDS = Metric(
    "outrider_pass_part_seconds", "counter", "Time of target passes by what it was spent on", ("part",)
)
DRAFTED = Metric("outrider_drafted_tokens", "counter", "Draft tokens sent by the draft tier, needed or not")
DRAFT_STEPS = Metric("outrider_draft_steps", "counter", "Draft steps")
BUSY_SECONDS = Metric("outrider_busy_seconds", "counter", "Time the model thread spent in passes or steps")
GPUS = Metric("outrider_gpus", "gauge", "GPUs the replica holds")
DESIRED_REPLICAS = Metric(
    "outrider_desired_replicas", "gauge", "Replicas the autoscaling policy asks for, within its bounds"
)
SCALING_DECISIONS = Metric(
    "outrider_scaling_decisions", "counter", "Changes of the desired replicas", ("direction", "reason")
)

TAG_VALUES: dict[str, tuple[str, ...]] = {
    "rule": ("coupled", "rejection", "block", "typical"),
    "tier": ("target", "draft"),
    "outcome": ("stop", "length", "tool_calls", "cancelled", "error"),
    "reason": (),
    "place": tuple(str(place) for place in range(1, 65)),
    "part": ("hold", "form", "forward", "commit"),
    "direction": ("up", "down"),
    "route": (),
    "status": ("2xx", "4xx", "5xx"),
}
"""Every tag of the table and its values; empty where the code that records it lists them (never a client's text)."""

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

    def total(self, metric: Metric, **tags: str) -> float:
        """Sum over all that have these tags. Other threads may record meanwhile."""
        wanted, sums = tags.items(), list(self.sums.items())
        return sum(v for (name, has), v in sums if name == metric.name and wanted <= dict(has).items())
