"""Turns what passes and steps did into metrics and into the loads that autoscaling goes by.

Kept out of the loops that do the work.
"""

from __future__ import annotations

from typing import Protocol

from actors import telemetry
from actors.scheduler import PassReport
from actors.settings import TargetSettings
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


class PassAccounts:
    """Metrics of one target replica."""

    def __init__(self, recorder: Recorder, settings: TargetSettings) -> None:
        self._recorder = recorder
        self._rule = settings.rule
        self._settings = settings
        self._gain: float | None = None
        self._starved = self._declined = self._inter_token = 0.0
        recorder.set(telemetry.SLOTS, settings.slots)
        recorder.set(telemetry.KV_POSITIONS, settings.slots * settings.context)

    def pass_done(self, report: PassReport, scheduler: Occupancy) -> None:
        """Book one pass."""
        recorder = self._recorder
        recorder.add(telemetry.PASSES, 1)
        recorder.observe(telemetry.PASS_SECONDS, report.seconds)
        recorder.add(telemetry.BUSY_SECONDS, report.form_seconds + report.seconds + report.commit_seconds)
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
        """What the autoscaling policy of this tier goes by (cluster.autoscaling.TargetLoad)."""
        slots = self._settings.slots
        return {
            "running": float(scheduler.active),
            "waiting": float(scheduler.queued),
            "slots": float(slots),
            "kv_share": scheduler.cached_positions / (slots * self._settings.context),
            "inter_token_s": self._inter_token if scheduler.active else 0.0,
            "starved": self._starved,
            "declined": self._declined,
        }

    def _decisions(self, report: PassReport) -> None:
        recorder = self._recorder
        verdicts = [ruling.verdict for ruling in report.rulings if ruling.verdict.error is None]
        committed = sum(len(v.tokens) for v in verdicts)
        recorder.add(telemetry.COMMITTED, committed)
        recorder.add(telemetry.DECIDED_ROWS, len(verdicts))
        recorder.add(telemetry.STARVED, report.starved)
        proposed = sum(v.proposed for v in verdicts)
        recorder.add(telemetry.PROPOSED, proposed, rule=self._rule)
        recorder.add(telemetry.SPECULATED_ROWS, sum(v.proposed > 0 for v in verdicts))
        recorder.add(telemetry.ACCEPTED, sum(v.accepted for v in verdicts), rule=self._rule)
        for place in range(max((v.proposed for v in verdicts), default=0)):
            tag = str(place + 1)
            recorder.add(telemetry.POSITION_PROPOSED, sum(v.proposed > place for v in verdicts), place=tag)
            recorder.add(telemetry.POSITION_ACCEPTED, sum(v.accepted > place for v in verdicts), place=tag)
        if verdicts and committed:
            rows = len(verdicts)
            whole = report.hold_seconds + report.form_seconds + report.seconds + report.commit_seconds
            self._starved += _SMOOTHING * (report.starved / rows - self._starved)
            self._declined += _SMOOTHING * (report.declined / rows - self._declined)
            self._inter_token += _SMOOTHING * (whole * rows / committed - self._inter_token)
        if report.plain_seconds > 0 and report.seconds > 0 and verdicts:
            gain = (committed / report.seconds) / (len(verdicts) / report.plain_seconds)
            self._gain = gain if self._gain is None else self._gain + _SMOOTHING * (gain - self._gain)
            recorder.set(telemetry.SPECULATION_GAIN, self._gain)


class StepAccounts:
    """Metrics of one draft replica."""

    def __init__(self, recorder: Recorder, slots: int) -> None:
        self._recorder = recorder
        recorder.set(telemetry.SLOTS, slots)

    def occupied(self, sequences: int) -> None:
        """Book the sequences that are followed now."""
        self._recorder.set(telemetry.ACTIVE, sequences, tier="draft")

    def step_done(self, *, seconds: float, drafted: int, sequences: int) -> None:
        """Book one step that sent `drafted` tokens."""
        recorder = self._recorder
        recorder.add(telemetry.DRAFT_STEPS, 1)
        recorder.observe(telemetry.DRAFT_STEP_SECONDS, seconds)
        recorder.add(telemetry.BUSY_SECONDS, seconds)
        recorder.add(telemetry.DRAFTED, drafted)
        self.occupied(sequences)
