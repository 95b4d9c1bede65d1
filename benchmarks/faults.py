"""What faults cost: `make bench-faults` kills and freezes processes, and lets load rise and fall, on emulated tiers.

Prints the longest pause that any stream saw after each kind of fault, the time from overload to the next replica, the
tokens that clients lost, and the goodput while replicas go. The tiers, the streams and the faults are real processes;
only the arithmetic is emulated, so that every token can be checked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics

from rich.console import Console
from rich.table import Table

from deployments import fault_bench, trial
from deployments.fault_bench import Failover, Scaling
from deployments.local import application, free_port, ray_cluster


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--skip-scaling", action="store_true")
    given = parser.parse_args()
    console = Console()

    def say(line: str) -> None:
        console.print(line, style="dim")

    with ray_cluster():
        config = trial.config("faults", free_port(), given.streams)
        with application(config) as url:
            failed = asyncio.run(fault_bench.failover(url, config, given.streams, given.repeats, say))
        scaled = None
        if not given.skip_scaling:
            with application(fault_bench.scaling_config("scaling", free_port(), given.streams)) as url:
                scaled = asyncio.run(fault_bench.scaling(url, given.streams, say))
    _print(console, failed, scaled, given.streams)


def _print(console: Console, failed: Failover, scaled: Scaling | None, streams: int) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    table = Table(title=f"{streams} streams, two replicas of everything ({machine})")
    for column in ("fault", "longest pause of a stream, s: median", "worst", "times"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for fault, gaps in failed.gaps.items():
        table.add_row(fault, f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}", str(len(gaps)))
    console.print(table)
    told = [failed.told, *(scaled.told if scaled is not None else [])]
    lost, changed = sum(len(one.lost) for one in told), sum(len(one.changed) for one in told)
    console.print(
        f"{sum(one.answers for one in told)} answers, {sum(one.tokens for one in told)} tokens; lost answers {lost}, "
        f"changed answers {changed}, broken connections {sum(len(one.broken) for one in told)}"
    )
    if scaled is not None:
        ups = ", ".join(f"{count} after {seconds:.1f} s" for count, seconds in scaled.up_s.items())
        console.print(f"overload, targets ready: {ups}; most drafts {scaled.most[1]}")
        console.print(
            f"load gone: 1 target after {scaled.down_s:.1f} s, no draft {scaled.rest_s:.1f} s after the last request; "
            f"goodput of the light load {scaled.during_rate:.1f} tokens/s meanwhile, {scaled.before_rate:.1f} before"
        )


if __name__ == "__main__":
    main()
