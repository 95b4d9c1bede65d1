"""What an engine that schedules itself said, put together with what the exchange reported of it.

The engine's words are what was committed. The reports say how they came about: which pass said what, how much of it
was drafts. Words of several passes may come together, and a report may be lost; then the words go out without it, and
count as decoded plainly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engines.vllm.engine import Said
from actors.errors import InvalidSettingError, OutriderError
from actors.messages import FinishReason, Verdict
from actors.target.proposal_broker import Ruled


@dataclass(slots=True)
class Told:
    """Verdicts for one sequence, and how many of its passes declined drafts or found none."""

    verdicts: list[Verdict] = field(default_factory=list)
    declined: int = 0
    starved: int = 0

    @property
    def length(self) -> int:
        """Tokens in all verdicts."""
        return sum(len(verdict.tokens) for verdict in self.verdicts)

    @property
    def ended(self) -> FinishReason | None:
        """How the sequence ended, if it did."""
        return self.verdicts[-1].finish if self.verdicts else None


def verdicts(sequence: str, position: int, said: Said, ruling: Callable[[int], Ruled | None]) -> Told:
    """One verdict per pass that was reported; one for all that follows a lost report.

    position: of the first token said. ruling: what was reported of the pass that decided a position.
    """
    told = Told()
    if said.error is not None:
        error = said.error if isinstance(said.error, OutriderError) else InvalidSettingError(str(said.error))
        told.verdicts.append(Verdict(sequence, position, (), finish="error", error=error))
        return told
    left, alternatives = said.tokens, said.alternatives
    while left or said.finish is not None:
        count = len(left)
        proposed = accepted = 0  # words of several passes may come together: how many were drafts, nobody knows
        margins: tuple[float, ...] = ()
        declined = False
        ruled = ruling(position)
        if ruled is not None:
            decided = ruled.decided
            count = min(count, len(decided.tokens))
            proposed, accepted = decided.proposed, min(decided.accepted, count)
            margins, declined = decided.margins[:count], ruled.declined
            told.declined += ruled.declined
            told.starved += ruled.starved
        last = count == len(left)
        told.verdicts.append(
            Verdict(
                sequence,
                position,
                left[:count],
                proposed,
                accepted,
                _finish(said.finish) if last else None,
                alternatives[:count],
                margins,
                declined,
            )
        )
        position += count
        left, alternatives = left[count:], alternatives[count:]
        if last:
            break
    return told


def _finish(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    return "stop" if reason == "stop" else "length" if reason == "length" else "error"
