"""PromQL over the metric table: the only place that spells a series' name, so that none can be misspelt.

Ray's exporter fills a histogram's `_sum` from the middles of its buckets, not from the values: means are therefore
never taken from a histogram here, only quantiles and shares below a boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors import telemetry as t
from actors.telemetry import Metric


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series, and over which window: a dashboard's variables, or an alert's fixed choice."""

    where: str = ""
    window: str = "5m"

    def select(self, *more: str) -> str:
        inside = ",".join(part for part in (self.where, *more) if part)
        return f"{{{inside}}}" if inside else ""


DASHBOARD = Scope('application=~"$application"', "$__rate_interval")


def series(metric: Metric, suffix: str = "") -> str:
    """The name that Ray exports."""
    return f"ray_{metric.name}{suffix or ('_total' if metric.kind == 'counter' else '')}"


def boundary(metric: Metric, value: float) -> str:
    """A bucket's `le`. Raises ValueError unless `value` is a boundary: shares are exact only there."""
    if value not in metric.boundaries:
        raise ValueError(f"{metric.name} has no boundary {value:g}")
    return f'le="{float(value)}"'


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def rate(scope: Scope, metric: Metric, *by: str, where: str = "") -> str:
    """Per second, summed over everything but `by`."""
    assert metric.kind == "counter", metric.name
    return f"sum{_by(by)} (rate({series(metric)}{scope.select(where)}[{scope.window}]))"


def total(scope: Scope, metric: Metric, *by: str, where: str = "") -> str:
    """A gauge, summed over everything but `by`."""
    assert metric.kind == "gauge", metric.name
    return f"sum{_by(by)} ({series(metric)}{scope.select(where)})"


def highest(scope: Scope, metric: Metric, *by: str, where: str = "") -> str:
    """A gauge that several processes report of the same thing: the greatest."""
    assert metric.kind == "gauge", metric.name
    return f"max{_by(by)} ({series(metric)}{scope.select(where)})"


def quantile(scope: Scope, q: float, metric: Metric, *by: str, where: str = "") -> str:
    assert metric.kind == "histogram", metric.name
    buckets = f"rate({series(metric, '_bucket')}{scope.select(where)}[{scope.window}])"
    return f"histogram_quantile({q}, sum{_by(('le', *by))} ({buckets}))"


def slower(scope: Scope, metric: Metric, limit: float, *by: str) -> str:
    """The share of observations above `limit`, which must be a boundary."""
    assert metric.kind == "histogram", metric.name
    good = f"sum{_by(by)} (rate({series(metric, '_bucket')}{scope.select(boundary(metric, limit))}[{scope.window}]))"
    every = f"sum{_by(by)} (rate({series(metric, '_count')}{scope.select()}[{scope.window}]))"
    return f"1 - {ratio(good, every)}"


def ratio(part: str, whole: str) -> str:
    """Nothing, rather than zero or not-a-number, where the whole is zero: no drafts is not 0 % acceptance."""
    return f"({part}) / (({whole}) > 0)"


def share(part: str, whole: str) -> str:
    """`ratio` of counters where the part may not have been counted yet, and is then zero."""
    return ratio(f"{part} or {whole} * 0", whole)


# -- what several panels and alerts ask ----------------------------------------------------------------------------


def acceptance_rate(scope: Scope, *by: str) -> str:
    return share(rate(scope, t.ACCEPTED, *by), rate(scope, t.PROPOSED, *by))


def acceptance_length(scope: Scope, *by: str) -> str:
    """Tokens committed per pass and sequence."""
    return ratio(rate(scope, t.COMMITTED, *by), rate(scope, t.DECIDED_ROWS, *by))


def starvation(scope: Scope, *by: str) -> str:
    """Share of the rows that wanted drafts and found none."""
    starved, served = rate(scope, t.STARVED, *by), rate(scope, t.SPECULATED_ROWS, *by)
    return ratio(f"{starved} or {served} * 0", f"({starved} or {served} * 0) + ({served} or {starved} * 0)")


def waste(scope: Scope, *by: str) -> str:
    """Share of drafted tokens that nobody accepted: branches not taken, rejected, or late."""
    return f"1 - {share(rate(scope, t.ACCEPTED, *by), rate(scope, t.DRAFTED, *by))}"


def errors(scope: Scope, *by: str) -> str:
    """Share of finished requests that ended with an error."""
    return share(rate(scope, t.REQUESTS, *by, where='outcome="error"'), rate(scope, t.REQUESTS, *by))


def refusals(scope: Scope, *by: str) -> str:
    """Share of all requests that were turned away."""
    refused, taken = rate(scope, t.REFUSED, *by), rate(scope, t.REQUESTS, *by)
    return ratio(refused, f"{refused} + ({taken} or {refused} * 0)")


def busy(scope: Scope, tier: str, *by: str) -> str:
    """Share of time that the tier's model threads spent in passes or steps, per replica."""
    return rate(scope, t.BUSY_SECONDS, *by, where=f'tier="{tier}"')


def tokens_per_gpu_second(scope: Scope, *by: str) -> str:
    """Delivered tokens per second over all GPUs held, of both tiers."""
    return ratio(rate(scope, t.EMITTED, *by), total(scope, t.GPUS, *by))
