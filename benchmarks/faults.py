"""What faults cost: `python -m benchmarks faults` kills and freezes processes and nodes, and lets load rise and fall.

Prints the longest pause that any stream saw after each kind of fault, the time from overload to the next replica, the
tokens that clients lost, and the goodput while replicas go. The tiers, the streams and the faults are real processes;
only the arithmetic is emulated, so that every token can be checked. Nodes are several on one machine.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.support import emulated_application, fault_scenarios, node_losses, options
from benchmarks.support.checked_load import Told
from benchmarks.support.fault_scenarios import Failover, Scaling
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.node_losses import Losses
from benchmarks.support.ray_nodes import cluster_of_nodes
from deployments.runtime.local import application, free_port, ray_cluster

MACHINE = f"{platform.machine()}, {os.cpu_count()} cores"
PAUSE_S = 2.0
"""What a stream may stand still for, besides the time after which a silence counts as a loss."""


def main(argv: Sequence[str]) -> int:
    """Run and print."""
    parser = options.parser("faults", __doc__)
    parser.add_argument("--streams", type=options.at_least(1), default=16)
    parser.add_argument("--repeats", type=options.at_least(1), default=2)
    parser.add_argument("--node-repeats", type=options.at_least(1), default=3)
    parser.add_argument("--only", choices=("processes", "scaling", "nodes"), help="leave the other parts out")
    given = parser.parse_args(argv)
    console = Console()

    def say(line: str) -> None:
        console.print(line, style="dim")

    parts = (given.only,) if given.only else ("processes", "scaling", "nodes")
    told: list[Told] = []
    goals: list[Goal] = []
    if "processes" in parts:
        config = emulated_application.config("faults", free_port(), given.streams)
        with ray_cluster(), application(config) as url:
            failed = asyncio.run(fault_scenarios.failover(url, config, given.streams, given.repeats, say))
        _print_failover(console, failed, given.streams)
        goals += _failover_goals(failed, config.orchestrator.settings.stall_timeout_s)
        told.append(failed.told)
    if "scaling" in parts:
        with ray_cluster(), application(fault_scenarios.scaling_config("scaling", free_port(), given.streams)) as url:
            scaled = asyncio.run(fault_scenarios.scaling(url, given.streams, say))
        _print_scaling(console, scaled)
        told += scaled.told
    if "nodes" in parts:
        config = node_losses.config("nodes", free_port(), given.streams)
        with cluster_of_nodes() as nodes, application(config) as url:
            drill = node_losses.Drill(url, config, nodes, given.streams, say)
            found = asyncio.run(drill.run(given.node_repeats))
        _print_nodes(console, found, given.streams, config.orchestrator.settings.stall_timeout_s)
        told += found.told
        goals += _node_goals(found, config.orchestrator.settings.stall_timeout_s)
    lost, changed = sum(len(one.lost) for one in told), sum(len(one.changed) for one in told)
    console.print(
        f"{sum(one.answers for one in told)} answers, {sum(one.tokens for one in told)} tokens; lost answers {lost}, "
        f"changed answers {changed}, broken connections {sum(len(one.broken) for one in told)}"
    )
    goals += [Goal("lost answers", lost, 0, at_least=False), Goal("changed answers", changed, 0, at_least=False)]
    return print_goals(goals)


def _failover_goals(failed: Failover, deadline_s: float) -> list[Goal]:
    """A pass and its draft go on within PAUSE_S of a death; what stands still is found out after the deadline."""
    return [
        Goal(
            f"{fault}: longest pause, s", max(gaps), PAUSE_S + (fault.startswith("freeze")) * deadline_s, at_least=False
        )
        for fault, gaps in failed.gaps.items()
    ]


def _node_goals(found: Losses, deadline_s: float) -> list[Goal]:
    """The streams that entered by another node."""
    return [
        Goal(
            f"node with {pool}, {how}: longest pause of streams that enter elsewhere, s",
            max(loss.pause for loss in found.losses if (loss.how, loss.pool) == (how, pool)),
            PAUSE_S + (how == "freeze") * deadline_s,
            at_least=False,
        )
        for how, pool in node_losses.STRIKES
    ]


def _print_failover(console: Console, failed: Failover, streams: int) -> None:
    table = Table(title=f"{streams} streams, two replicas of everything ({MACHINE})")
    for column in ("fault", "longest pause of a stream, s: median", "worst", "times"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for fault, gaps in failed.gaps.items():
        table.add_row(fault, f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}", str(len(gaps)))
    console.print(table)


def _print_scaling(console: Console, scaled: Scaling) -> None:
    ups = ", ".join(f"{count} after {seconds:.1f} s" for count, seconds in scaled.up_s.items())
    console.print(f"overload, targets ready: {ups}; most drafts {scaled.most[1]}")
    console.print(
        f"load gone: 1 target after {scaled.down_s:.1f} s, no draft {scaled.rest_s:.1f} s after the last request; "
        f"goodput of the light load {scaled.during_rate:.1f} tokens/s meanwhile, {scaled.before_rate:.1f} before"
    )


def _print_nodes(console: Console, found: Losses, streams: int, deadline_s: float) -> None:
    """What may have entered or been answered on the lost node stands apart: its clients' own connections led there."""
    table = Table(
        title=f"{streams} streams, two nodes of each kind, deadline {deadline_s:g} s ({MACHINE}); s: median, worst"
    )
    for column in ("node", "pause of others", "their first token", "ended", "silence of its own", "times"):
        table.add_column(column, justify="left" if column == "node" else "right")
    for how, pool in node_losses.STRIKES:
        losses = [loss for loss in found.losses if (loss.how, loss.pool) == (how, pool)]
        table.add_row(
            f"{pool}, {how}",
            _spread([loss.pause for loss in losses]),
            _spread([loss.wait for loss in losses]),
            " ".join(str(loss.ended) for loss in losses),
            _spread([loss.own for loss in losses]),
            str(len(losses)),
        )
    console.print(table)
    for pool in ("models", "front"):
        held = {", ".join(loss.held) for loss in found.losses if loss.pool == pool}
        console.print(f"a {pool} node held: {'; or '.join(sorted(held))}")
    console.print(
        f"frozen for {node_losses.SEEN_S:g} s at least; answers ended with ingress_lost: {found.ingress_lost}"
    )


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f}, {max(seconds):.2f}"
