"""From what a run noted to the figures that are reported. Arithmetic only."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.support.actor_rig import Answer, Run
from benchmarks.support.timed_actors import PassNote, ReplicaNotes
from cluster.observability.quantiles import quantile

Figures = dict[str, float]
"""Name -> value of one repeat. Seconds, tokens, and ratios."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one sequence on one pair: a pass and a draft step (seconds), and acceptance per token."""

    pass_s: float
    step_s: float
    acceptance: float

    @property
    def lookahead(self) -> int:
        """Draft steps that fit in a pass."""
        return int(self.pass_s / self.step_s + 1e-9) if self.step_s > 0 else 64

    @property
    def tokens_per_pass(self) -> float:
        """The bound: every outcome of every pass has its drafts ready (Leviathan et al. 2023, equation 1)."""
        return expected_tokens_per_pass(self.acceptance, self.lookahead)


def expected_tokens_per_pass(acceptance: float, k: int) -> float:
    """Tokens that a pass over k draft tokens commits on average."""
    return float(k + 1) if acceptance >= 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)


def in_turn_speedup(limits: Limits, hop_s: float, k: int) -> float:
    """Speed over plain decoding when draft and target take turns, each waiting for the other."""
    period = limits.pass_s + k * limits.step_s + hop_s
    return expected_tokens_per_pass(limits.acceptance, k) * limits.pass_s / period


def best_in_turn_k(limits: Limits, hop_s: float) -> int:
    """The lookahead at which taking turns is fastest."""
    return max(range(1, 33), key=lambda k: in_turn_speedup(limits, hop_s, k))


def figures(run: Run) -> Figures:
    """The figures of one run, over all its requests and replicas."""
    tokens = sum(len(answer.tokens) for answer in run.answers)
    started = min(answer.started for answer in run.answers)
    ended = max(answer.arrivals[-1][0] for answer in run.answers if answer.arrivals)
    wall = ended - started
    passes = [note for replica in run.targets for note in replica.passes]
    steps = [note for replica in run.drafts for note in replica.steps]
    decided = sum(note.rows for note in passes)
    proposed = sum(note.proposed for note in passes)
    accepted = sum(note.accepted for note in passes)
    busy_target = sum(note.ended - note.started for note in passes)
    busy_draft = sum(note.ended - note.started for note in steps)
    latencies = [latency for answer in run.answers for latency in inter_token(answer)]
    found: Figures = {
        "tokens": tokens,
        "wall_s": wall,
        "tokens_per_s": tokens / wall,
        "ttft_p50_s": quantile([a.arrivals[0][0] - a.started for a in run.answers if a.arrivals], 0.5),
        "itl_p50_s": quantile(latencies, 0.5),
        "itl_p99_s": quantile(latencies, 0.99),
        "passes": len(passes),
        "rows_per_pass": decided / max(len(passes), 1),
        "tokens_in_pass": sum(note.tokens for note in passes) / max(len(passes), 1),
        "pass_s": busy_target / max(len(passes), 1),
        "acceptance_length": sum(note.committed for note in passes) / max(decided, 1),
        "acceptance_rate": accepted / proposed if proposed else float("nan"),
        "rejected_share": (proposed - accepted) / max(proposed + decided, 1),
        "target_busy_s_per_1000": 1000 * busy_target / max(tokens, 1),
        "draft_busy_s_per_1000": 1000 * busy_draft / max(tokens, 1),
        "draft_rows_per_step": sum(note.rows for note in steps) / len(steps) if steps else float("nan"),
        "errors": sum(answer.error is not None for answer in run.answers),
    }
    found |= steady(run)
    found |= lost_time(run.targets, wall)
    found |= hops(run)
    found |= messages(run, len(passes))
    return found


def steady(run: Run) -> Figures:
    """While every request was being answered, from the last first token to the first last one: tokens per second,
    tokens in a target pass, nodes in a draft step, and tokens that a pass commits per sequence."""
    begun = [answer for answer in run.answers if answer.arrivals]
    start = max(answer.arrivals[0][0] for answer in begun)
    end = min(answer.arrivals[-1][0] for answer in begun)
    tokens = sum(count for answer in begun for at, count in answer.arrivals if start < at <= end)
    passes = [p for replica in run.targets for p in replica.passes if start < p.started and p.ended <= end]
    steps = [s for replica in run.drafts for s in replica.steps if start < s.started and s.ended <= end]
    return {
        "steady_tokens_per_s": tokens / (end - start) if end > start else float("nan"),
        "steady_tokens_in_pass": _mean(note.tokens for note in passes),
        "steady_acceptance_length": sum(p.committed for p in passes) / max(sum(p.rows for p in passes), 1),
        "steady_rows_per_step": _mean(note.rows for note in steps),
    }


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return statistics.fmean(held) if held else float("nan")


def inter_token(answer: Answer) -> list[float]:
    """Seconds per token after the first arrival. Tokens that came together share the time since those before."""
    times: list[float] = []
    for (before, _), (at, count) in itertools.pairwise(answer.arrivals):
        times.extend([(at - before) / count] * count if count else [])
    return times


def gaps(passes: Sequence[PassNote]) -> Iterable[tuple[float, float]]:
    """Seconds between passes: held for drafts, and spent otherwise."""
    for before, after in itertools.pairwise(passes):
        between = after.started - before.ended
        yield min(after.held_s, between), max(between - after.held_s, 0.0)


def lost_time(targets: Sequence[ReplicaNotes], wall: float) -> Figures:
    """Where the targets' time went, as shares of wall time: in passes, held for drafts, between passes, idle.

    Between passes is the engine's overhead: taking mail, forming the pass, handing out verdicts. The rest of the
    wall time is the start and the end of requests.
    """
    total = wall * max(len(targets), 1)
    busy = sum(note.ended - note.started for replica in targets for note in replica.passes)
    between = [gap for replica in targets for gap in gaps(replica.passes)]
    held, other = sum(h for h, _ in between), sum(o for _, o in between)
    return {
        "share_in_passes": busy / total,
        "share_held_for_drafts": held / total,
        "share_between_passes": other / total,
        "share_idle": max(0.0, 1 - (busy + held + other) / total),
        "between_passes_p50_s": quantile([o for _, o in between], 0.5),
        "between_passes_p99_s": quantile([o for _, o in between], 0.99),
    }


def hops(run: Run) -> Figures:
    """One-way times: from the end of a draft step to the target's mailbox, and from the end of a pass to the draft."""
    at_targets = {mark: at for replica in run.targets for mark, at in replica.arrivals.items()}
    at_drafts = {mark: at for replica in run.drafts for mark, at in replica.arrivals.items()}
    offers = [
        at_targets[note.mark] - note.ended
        for replica in run.drafts
        for note in replica.steps
        if note.mark is not None and note.mark in at_targets
    ]
    commits = [
        at_drafts[mark] - note.ended
        for replica in run.targets
        for note in replica.passes
        for mark in note.marks
        if mark in at_drafts
    ]
    return {
        "offer_hop_p50_s": quantile(offers, 0.5),
        "offer_hop_p90_s": quantile(offers, 0.9),
        "commit_hop_p50_s": quantile(commits, 0.5),
        "commit_hop_p90_s": quantile(commits, 0.9),
    }


def messages(run: Run, passes: int) -> Figures:
    """Messages per pass, over all links: calls that brought mail, and items of the result streams."""
    replicas = [*run.targets, *run.drafts]
    return {
        "calls_per_pass": sum(replica.deliveries for replica in replicas) / max(passes, 1),
        "stream_items_per_pass": sum(replica.streamed for replica in replicas) / max(passes, 1),
    }


def against_bound(run: Run, found: Figures, limits: Limits) -> Figures:
    """How near one sequence on one pair came to the bound, and what kept it from there, as shares of wall time.

    A pass whose whole proposal was accepted although it was shorter than fits in a pass lost what the missing drafts
    would have committed on average: drafts not ready. What is left of the time in passes is the luck of the draw and
    the difference between the lookahead that was chosen and the bound's.
    """
    bound, k = limits.tokens_per_pass, limits.lookahead
    at_bound = found["tokens"] / bound * limits.pass_s / found["wall_s"]
    missed = sum(
        expected_tokens_per_pass(limits.acceptance, k - note.proposed) - 1
        for replica in run.targets
        for note in replica.passes
        if note.rows == 1 and note.full and note.proposed < k
    )
    not_ready = missed / bound * limits.pass_s / found["wall_s"]
    return {
        "bound_tokens_per_pass": bound,
        "share_at_bound": at_bound,
        "share_drafts_not_ready": not_ready,
        "share_rest": found["share_in_passes"] - at_bound - not_ready,
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """A figure over repeats."""

    median: float
    least: float
    most: float


def summarise(repeats: Sequence[Figures]) -> dict[str, Summary]:
    """Median and range of every figure."""
    names = list(repeats[0])
    return {
        name: Summary(statistics.median(values), min(values), max(values))
        for name in names
        if (values := [repeat[name] for repeat in repeats])
    }
