"""The four dashboards: what users feel, whether speculation pays, and each tier."""

from __future__ import annotations

from actors import telemetry as t
from actors.telemetry import Metric
from cluster.observability.grafana import queries as q
from cluster.observability.grafana.panels import Model, Panel, Query, Row, dashboard, variable
from cluster.observability.grafana.queries import DASHBOARD as S

APPLICATION = variable("application", "Application", f"label_values({q.series(t.REQUESTS)}, application)")


def _quantiles(metric: Metric, *by: str, where: str = "") -> tuple[Query, ...]:
    names = " ".join(f"{{{{{label}}}}}" for label in by)
    return tuple(
        Query(q.quantile(S, level, metric, *by, where=where), f"{names} p{level * 100:g}".strip())
        for level in (0.5, 0.95, 0.99)
    )


def _of(tier: str) -> str:
    return f'tier="{tier}"'


def users() -> Model:
    """What users feel."""
    now = Row(
        "Now",
        (
            Panel("Requests", "Finished per second.", (Query(q.rate(S, t.REQUESTS)),), "reqps", "stat", 4),
            Panel("Errors", "Share of finished requests.", (Query(q.errors(S)),), "percentunit", "stat", 4),
            Panel("First token, p95", "", (Query(q.quantile(S, 0.95, t.TTFT)),), "s", "stat", 4),
            Panel("Between tokens, p99", "", (Query(q.quantile(S, 0.99, t.ITL)),), "s", "stat", 4),
            Panel("Tokens", "Delivered per second.", (Query(q.rate(S, t.EMITTED)),), "short", "stat", 4),
            Panel(
                "Tokens per GPU-second", "Over both tiers.", (Query(q.tokens_per_gpu_second(S)),), "short", "stat", 4
            ),
        ),
    )
    speed = Row(
        "Speed",
        (
            Panel("Time to first token", "From request to first token.", _quantiles(t.TTFT), "s"),
            Panel("Between tokens", "Time per token of a delivery.", _quantiles(t.ITL), "s"),
            Panel("Whole request", "From request to last token.", _quantiles(t.REQUEST_SECONDS), "s"),
            Panel(
                "Tokens per second",
                "Prompt tokens taken in, and tokens delivered.",
                (Query(q.rate(S, t.PROMPT_TOKENS), "prompt"), Query(q.rate(S, t.EMITTED), "delivered")),
            ),
            Panel(
                "Tokens per GPU-second",
                "Delivered tokens over all GPUs held by both tiers: what an answer costs.",
                (Query(q.tokens_per_gpu_second(S, "application"), "{{application}}"),),
            ),
            Panel(
                "Answers by rule",
                "Draft tokens verified, by acceptance rule; `typical` is relaxed, all others are exact.",
                (Query(q.rate(S, t.PROPOSED, "rule"), "{{rule}}"),),
                stacked=True,
            ),
        ),
    )
    outcome = Row(
        "Outcome",
        (
            Panel(
                "Requests by outcome",
                "Finished per second.",
                (Query(q.rate(S, t.REQUESTS, "outcome"), "{{outcome}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Responses",
                "HTTP responses begun, by route and class of status.",
                (Query(q.rate(S, t.HTTP_RESPONSES, "route", "status"), "{{route}} {{status}}"),),
                "reqps",
            ),
            Panel(
                "Turned away",
                "Requests refused before they began, by reason.",
                (Query(q.rate(S, t.REFUSED, "reason"), "{{reason}}"),),
                "reqps",
            ),
        ),
    )
    return dashboard("outrider-users", "Outrider: users", "What users feel.", (now, speed, outcome), (APPLICATION,))


def speculation() -> Model:
    """Whether speculation pays, and if not, why."""
    pays = Row(
        "Does it pay?",
        (
            Panel(
                "Acceptance length",
                "Tokens committed per pass and sequence. 1 is plain decoding.",
                (Query(q.acceptance_length(S, "application"), "{{application}}"),),
            ),
            Panel(
                "Estimated gain",
                "Tokens per second with the chosen lookahead over those without, as the controller estimates.",
                (Query(q.highest(S, t.SPECULATION_GAIN, "replica"), "{{replica}}"),),
            ),
            Panel(
                "Acceptance rate",
                "Accepted over verified draft tokens, by rule.",
                (Query(q.acceptance_rate(S, "rule"), "{{rule}}"),),
                "percentunit",
            ),
        ),
    )
    why = Row(
        "Why?",
        (
            Panel(
                "Acceptance by place",
                "By place in the block, over all blocks that reach it. A steep fall: lower the lookahead's maximum.",
                (Query(q.share(q.rate(S, t.POSITION_ACCEPTED, "place"), q.rate(S, t.POSITION_PROPOSED, "place")),
                       "{{place}}"),),
                "percentunit",
                "bargauge",
            ),
            Panel(
                "Starvation",
                "Share of rows that wanted drafts and found none: the draft tier is slow, small or far.",
                (Query(q.starvation(S, "application"), "{{application}}"),),
                "percentunit",
            ),
            Panel(
                "Lookahead",
                "Draft tokens verified per decided row: as many as were there and worth their time.",
                (
                    Query(q.share(q.rate(S, t.PROPOSED), q.rate(S, t.DECIDED_ROWS)), "verified"),
                ),
            ),
            Panel(
                "Draft tokens",
                "Sent by drafts, verified by targets, accepted. The gaps are work in vain.",
                (
                    Query(q.rate(S, t.DRAFTED), "sent"),
                    Query(q.rate(S, t.PROPOSED), "verified"),
                    Query(q.rate(S, t.ACCEPTED), "accepted"),
                ),
            ),
            Panel(
                "Wasted draft work",
                "Share of draft tokens sent that were not accepted. High by design: a tree holds many outcomes.",
                (Query(q.waste(S, "application"), "{{application}}"),),
                "percentunit",
            ),
            Panel("Link delay", "From sending to handling at the orchestrator, by tier.",
                  _quantiles(t.LINK_SECONDS, "tier"), "s"),
        ),
    )  # fmt: skip
    return dashboard(
        "outrider-speculation", "Outrider: speculation", "Does speculation pay, and why.", (pays, why), (APPLICATION,)
    )


def _replicas(tier: str) -> Row:
    where = _of(tier)
    return Row(
        "Replicas",
        (
            Panel(
                "Replicas",
                "What the policy asks for, and what the orchestrators are linked to.",
                (
                    Query(q.highest(S, t.DESIRED_REPLICAS, "application", where=where), "desired {{application}}"),
                    Query(q.highest(S, t.READY_REPLICAS, "application", where=where), "linked {{application}}"),
                ),
            ),
            Panel(
                "Scaling decisions",
                "Changes of the desired number, by direction and reason.",
                (
                    Query(
                        q.rate(S, t.SCALING_DECISIONS, "direction", "reason", where=where), "{{direction}}: {{reason}}"
                    ),
                ),
            ),
            Panel(
                "Sequences moved",
                "Because a replica went.",
                (Query(q.rate(S, t.MOVES, where=where), "moved"),),
            ),
            Panel(
                "Actors lost",
                "Died or stood still, and were replaced.",
                (Query(q.rate(S, t.ACTOR_LOSSES, "replica", where=where), "{{replica}}"),),
            ),
        ),
    )


def target() -> Model:
    """The target tier."""
    where = _of("target")
    work = Row(
        "Work",
        (
            Panel("Passes", "Per second and replica.", (Query(q.rate(S, t.PASSES, "replica"), "{{replica}}"),)),
            Panel("Pass duration", "", _quantiles(t.PASS_SECONDS), "s"),
            Panel(
                "Busy",
                "Share of time in passes. Near 1: saturated, or rightly sized.",
                (Query(q.busy(S, "target", "replica"), "{{replica}}"),),
                "percentunit",
            ),
            Panel(
                "Where a pass's time goes",
                "Held for drafts, formed, forward (verification included), committed.",
                (Query(q.rate(S, t.PASS_PART_SECONDS, "part"), "{{part}}"),),
                "percentunit",
                stacked=True,
            ),
            Panel(
                "Sequences per pass",
                "Decided rows per pass.",
                (Query(q.ratio(q.rate(S, t.DECIDED_ROWS, "replica"), q.rate(S, t.PASSES, "replica")), "{{replica}}"),),
            ),
            Panel("Tokens committed", "Per second and replica.",
                  (Query(q.rate(S, t.COMMITTED, "replica"), "{{replica}}"),)),
        ),
    )  # fmt: skip
    room = Row(
        "Room",
        (
            Panel(
                "Queue",
                "Sequences that wait for a slot.",
                (Query(q.total(S, t.QUEUE, "replica", where=where), "{{replica}}"),),
            ),
            Panel("Wait for a slot", "", _quantiles(t.QUEUE_SECONDS, where=where), "s"),
            Panel(
                "Slots",
                "Sequences that hold one, and all of them.",
                (
                    Query(q.total(S, t.ACTIVE, where=where), "held"),
                    Query(q.total(S, t.SLOTS, where=where), "slots"),
                ),
            ),
            Panel(
                "KV positions in use",
                "Share of all positions that hold a token.",
                (
                    Query(
                        q.ratio(
                            q.total(S, t.KV_USED, "replica", where=where),
                            q.total(S, t.KV_POSITIONS, "replica", where=where),
                        ),
                        "{{replica}}",
                    ),
                ),
                "percentunit",
            ),
        ),
    )
    return dashboard(
        "outrider-target",
        "Outrider: target tier",
        "The expensive tier.",
        (work, room, _replicas("target")),
        (APPLICATION,),
    )


def draft() -> Model:
    """The draft tier."""
    where = _of("draft")
    work = Row(
        "Work",
        (
            Panel("Steps", "Per second and replica.", (Query(q.rate(S, t.DRAFT_STEPS, "replica"), "{{replica}}"),)),
            Panel("Step duration", "", _quantiles(t.DRAFT_STEP_SECONDS), "s"),
            Panel(
                "Busy",
                "Share of time in steps. Near 1 with starvation: too few drafts.",
                (Query(q.busy(S, "draft", "replica"), "{{replica}}"),),
                "percentunit",
            ),
            Panel("Draft tokens sent", "Per second and replica.",
                  (Query(q.rate(S, t.DRAFTED, "replica"), "{{replica}}"),)),
            Panel(
                "Starvation",
                "As targets see it: share of rows that wanted drafts and found none.",
                (Query(q.starvation(S, "application"), "{{application}}"),),
                "percentunit",
            ),
            Panel(
                "Sessions",
                "Sequences drafted for, and slots.",
                (
                    Query(q.total(S, t.ACTIVE, "replica", where=where), "{{replica}}"),
                    Query(q.total(S, t.SLOTS, where=where), "slots"),
                ),
            ),
        ),
    )  # fmt: skip
    return dashboard(
        "outrider-draft", "Outrider: draft tier", "The cheap tier.", (work, _replicas("draft")), (APPLICATION,)
    )


def all_dashboards() -> tuple[Model, ...]:
    """Every dashboard, in the order of a reader's interest."""
    return users(), speculation(), target(), draft()
