"""Turns what passes and steps did into metrics and into the loads that autoscaling goes by.

Kept out of the loops that do the work.
"""

from __future__ import annotations

from typing import Protocol

from actors import telemetry
from actors.settings import TargetSettings
from actors.target.pass_report import PassReport
from actors.telemetry import Recorder

_SMOOTHING = 0.05
"""Share of the newest pass in running means, which would jump from pass to pass otherwise."""


class Occupancy(Protocol):
    """What a target holds now (a Scheduler, or an engine that schedules itself)."""

    @property
    def active(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def cached_positions(self) -> int: ...


class PassMetrics:
    """Metrics of one target replica."""

    def __init__(self, recorder: Recorder, settings: TargetSettings) -> None:
        self._recorder = recorder
        self._rule = settings.rule
        self._settings = settings
        self._gain: float | None = None
        self._starved = self._declined = self._inter_token = 0.0
        self._proposed = self._accepted = self._committed = self._held = 0.0
        self._passes, self._busy_s, self._rows = 0, 0.0, 0
        self._ended = self._row_seconds = 0.0
        self._decided = self._tokens = self._squares = 0
        recorder.set(telemetry.SLOTS, settings.slots)
        recorder.set(telemetry.KV_POSITIONS, settings.slots * settings.context)

    def pass_done(self, report: PassReport, scheduler: Occupancy) -> None:
        """Book one pass."""
        recorder = self._recorder
        recorder.add(telemetry.PASSES, 1)
        recorder.observe(telemetry.PASS_SECONDS, report.seconds)
        busy = report.form_seconds + report.seconds + report.commit_seconds
        recorder.add(telemetry.BUSY_SECONDS, busy)
        self._passes, self._busy_s = self._passes + 1, self._busy_s + busy
        self._rows += sum(map(len, report.results.values()))
        parts = {
            "hold": report.hold_seconds,
            "form": report.form_seconds,
            "forward": report.seconds,
            "commit": report.commit_seconds,
        }
        for part, seconds in parts.items():
            recorder.add(telemetry.PASS_PART_SECONDS, seconds, part=part)
        self.occupied(scheduler)
        for seconds in report.queue_seconds:
            recorder.observe(telemetry.QUEUE_SECONDS, seconds)
        self._decisions(report)

    def occupied(self, scheduler: Occupancy) -> None:
        """Book what is held now: also when sequences end between passes, which may be the last ones for long."""
        self._recorder.set(telemetry.QUEUE, scheduler.queued, tier="target")
        self._recorder.set(telemetry.ACTIVE, scheduler.active, tier="target")
        self._recorder.set(telemetry.KV_USED, scheduler.cached_positions)

    def load(self, scheduler: Occupancy) -> dict[str, float]:
        """What the autoscaling policy of this tier goes by (cluster.scaling.policies.TargetLoad)."""
        slots = self._settings.slots
        return {
            "running": float(scheduler.active),
            "waiting": float(scheduler.queued),
            "slots": float(slots),
            "kv_share": scheduler.cached_positions / (slots * self._settings.context),
            "inter_token_s": self._inter_token if scheduler.active else 0.0,
            "residence_s": self._row_seconds / self._ended if self._ended else 0.0,
            "starved": self._starved,
            "declined": self._declined,
        }

    def facts(self, scheduler: Occupancy) -> dict[str, float]:
        """For people: the load, what the controllers do, and what comes of it; running means over passes.

        lookahead: draft tokens verified, acceptance_length: tokens committed, per pass and sequence. held: share of
        the time in which passes waited for drafts. gain: tokens per second over plain decoding's, as estimated.
        passes, busy_s and rows (sequences in passes) count from the start; so do decided (sequences in passes that
        committed tokens), committed (these tokens) and committed_squares (the sum of the squares of their numbers).
        """
        facts = self.load(scheduler) | {
            "lookahead": self._proposed,
            "held": self._held,
            "passes": float(self._passes),
            "busy_s": self._busy_s,
            "rows": float(self._rows),
            "decided": float(self._decided),
            "committed": float(self._tokens),
            "committed_squares": float(self._squares),
        }
        if self._committed:
            facts["acceptance_length"] = self._committed
        if self._proposed:
            facts["acceptance_rate"] = self._accepted / self._proposed
        if self._gain is not None:
            facts["gain"] = self._gain
        return facts

    def _decisions(self, report: PassReport) -> None:
        recorder = self._recorder
        results = [result for result in report if result.error is None]
        lengths = [len(r.tokens) for r in results if r.tokens]
        committed = sum(lengths)
        self._decided, self._tokens = self._decided + len(lengths), self._tokens + committed
        self._squares += sum(length * length for length in lengths)
        recorder.add(telemetry.COMMITTED, committed)
        recorder.add(telemetry.DECIDED_ROWS, len(results))
        starved, declined = report.starved, report.declined
        recorder.add(telemetry.STARVED, starved)
        proposed = sum(r.proposed for r in results)
        recorder.add(telemetry.PROPOSED, proposed, rule=self._rule)
        recorder.add(telemetry.SPECULATED_ROWS, sum(r.proposed > 0 for r in results))
        recorder.add(telemetry.ACCEPTED, sum(r.accepted for r in results), rule=self._rule)
        for place in range(max((r.proposed for r in results), default=0)):
            tag = str(place + 1)
            recorder.add(telemetry.POSITION_PROPOSED, sum(r.proposed > place for r in results), place=tag)
            recorder.add(telemetry.POSITION_ACCEPTED, sum(r.accepted > place for r in results), place=tag)
        if results and committed:
            rows = len(results)
            whole = report.hold_seconds + report.form_seconds + report.seconds + report.commit_seconds
            share = _SMOOTHING if self._committed else 1.0
            accepted = sum(r.accepted for r in results)
            self._proposed += share * (proposed / rows - self._proposed)
            self._accepted += share * (accepted / rows - self._accepted)
            self._committed += share * (committed / rows - self._committed)
            self._held += share * (report.hold_seconds / max(whole, 1e-9) - self._held)
            self._starved += _SMOOTHING * (starved / rows - self._starved)
            self._declined += _SMOOTHING * (declined / rows - self._declined)
            self._inter_token += _SMOOTHING * (whole * rows / committed - self._inter_token)
            self._reside(rows * whole, sum(r.finish is not None for r in results))
        if report.plain_seconds > 0 and report.seconds > 0 and results:
            taken = report.form_seconds + report.seconds + report.commit_seconds
            gain = (committed / taken) / (len(results) / report.plain_seconds)
            self._gain = gain if self._gain is None else self._gain + _SMOOTHING * (gain - self._gain)
            recorder.set(telemetry.SPECULATION_GAIN, self._gain)

    def _reside(self, row_seconds: float, ended: int) -> None:
        """Little's law over the last twenty or so sequences that ended: time in passes, over how many ended in it."""
        memory = (1 - _SMOOTHING) ** ended
        self._row_seconds = memory * self._row_seconds + row_seconds
        self._ended = memory * self._ended + ended


class StepMetrics:
    """Metrics of one draft replica."""

    def __init__(self, recorder: Recorder, slots: int) -> None:
        self._recorder = recorder
        self._step = self._width = 0.0
        recorder.set(telemetry.SLOTS, slots)

    def facts(self) -> dict[str, float]:
        """For people: running means of a step's seconds, and of the draft tokens that it sent."""
        return {"step_s": self._step, "drafted": self._width} if self._step else {}

    def occupied(self, sequences: int) -> None:
        """Book the sequences that are followed now."""
        self._recorder.set(telemetry.ACTIVE, sequences, tier="draft")

    def step_done(self, *, seconds: float, drafted: int, sequences: int) -> None:
        """Book one step that sent `drafted` tokens."""
        recorder = self._recorder
        share = _SMOOTHING if self._step else 1.0
        self._step += share * (seconds - self._step)
        self._width += share * (drafted - self._width)
        recorder.add(telemetry.DRAFT_STEPS, 1)
        recorder.observe(telemetry.DRAFT_STEP_SECONDS, seconds)
        recorder.add(telemetry.BUSY_SECONDS, seconds)
        recorder.add(telemetry.DRAFTED, drafted)
        self.occupied(sequences)
