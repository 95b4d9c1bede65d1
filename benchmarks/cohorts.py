"""Is it worth splitting the sequences of a target into two cohorts that take turns?

While one cohort's pass runs, the other's drafts would be made, so that each pass finds all of them ready; but a pass
then serves half the sequences. `python -m benchmarks cohorts` sets one cohort, simulated with the real scheduler,
controller and outcome trees (cluster.planning.simulator), beside the most that two could do: passes back to back,
every draft ready, the best fixed lookahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from actors.engines.emulated.language import Agreement
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.settings import TreeSettings
from benchmarks.support import options
from cluster.planning.planner import PlanInput, expected_row, expected_tokens

SEQUENCES = 32
ACCEPTANCE = 0.8
COSTS = ((25.0, 0.02), (25.0, 0.1), (10.0, 0.2), (10.0, 0.5), (5.0, 1.0))
"""Milliseconds of a pass, and more for every token in it: from memory-bound to compute-bound."""
LONGEST = 12


def best_ready(sequences: int, base_ms: float, token_ms: float) -> tuple[float, int]:
    """Tokens per second of passes over `sequences` with all drafts ready, and the lookahead at which that is most."""
    return max(
        (
            1e3 * sequences * expected_tokens(ACCEPTANCE, k) / (base_ms + token_ms * sequences * (1 + k)),
            k,
        )
        for k in range(LONGEST + 1)
    )


def simulated(base_ms: float, token_ms: float) -> float:
    """Tokens per second of one cohort, with what drafts are ready in time."""
    given = PlanInput(
        target=TargetSpec(pass_ms=base_ms, token_ms=token_ms),
        draft=DraftSpec(step_ms=3.0, row_ms=0.005),
        agreements={"coupled": Agreement(acceptance=ACCEPTANCE, spread=0.0)},
        sequences=SEQUENCES,
        tree=TreeSettings(width=4 * SEQUENCES, branching=5, depth=24, nodes=256, min_reach=1e-3),
        effort=1200,
    )
    return expected_row(given, "coupled", "tree", 8).tokens_per_second


def main(argv: Sequence[str]) -> int:
    """Run and print."""
    options.parser("cohorts", __doc__).parse_args(argv)
    table = Table(title=f"{SEQUENCES} sequences, acceptance {ACCEPTANCE}, draft step 3 ms: tokens/s")
    for column in ("pass", "one cohort", "two, all drafts ready", "one, all drafts ready"):
        table.add_column(column, justify="right")
    for base_ms, token_ms in COSTS:
        two, _ = best_ready(SEQUENCES // 2, base_ms, token_ms)
        bound, k = best_ready(SEQUENCES, base_ms, token_ms)
        one = simulated(base_ms, token_ms)
        table.add_row(f"{base_ms:g} ms + {token_ms:g}/token", f"{one:.0f}", f"{two:.0f}", f"{bound:.0f} (k {k})")
    Console().print(table)
    return 0
