"""Whether verifying drafts pays, tried out where computing it is not enough.

The lookahead controller computes what drafts gain from confidences and pass times. It does not see what they cost
beside the pass: a draft, the links and the exchange may take time from the very cores that an engine's scheduler
needs. Where the computed gain is small, that decides. So it is tried, with, without and with drafts again, by the
wall clock: what is compared is tokens committed per second, whatever the seconds went to.

Pure: seconds come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

SETTLE = 8
"""Passes after a change that are not counted: the draft, its links and prefills under way have to follow."""
MEASURED = 24
"""Passes counted in each of the spells; without drafts twice as many. The speed of single passes varies by a few
percent, so the comparison is good to about one."""
LIKE = 1.5
"""A load within this factor counts as the same: what was found out holds for it, and for no other."""
FORGET = 64
"""Passes of other loads in a row after which it is forgotten; a batch that drains and fills again takes fewer."""
REST = 512
"""Passes until it is tried again; twice as many each time that says the same, up to LONGEST_REST."""
LONGEST_REST = 8192


@dataclass(slots=True)
class _Spell:
    drafts: bool
    settle: int
    left: int


class Payoff:
    """Tries for one target replica. least: gain of tokens per second below which drafts do not pay."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._spells: list[_Spell] = []
        self._tokens = {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}
        self._rows = 0
        """Sequences in a pass when the trial began; 0 when nothing is known or tried."""
        self._away = 0
        """Passes since then, in a row, that are another question."""
        self._last = self._steady = 0
        self._rest = 0
        self._next_rest = REST
        self._pays = True
        self.gain = 0.0
        """What the last trial found: tokens per second with drafts over those without, less one."""

    @property
    def is_trying(self) -> bool:
        """A trial is under way: nothing else should change the passes meanwhile."""
        return bool(self._spells) and not self._away

    @property
    def allows(self) -> bool:
        """May drafts be verified now?"""
        if self._away:
            return True
        return self._spells[0].drafts if self._spells else self._pays

    def observe(self, rows: int, tokens: int, seconds: float, doubtful: bool) -> None:
        """A pass followed the one before at once, `seconds` later, and committed `tokens` for `rows` sequences.

        doubtful: the computed gain is small, but not so small that nothing is verified anyway.
        """
        self._steady = self._steady + 1 if _alike(rows, self._last) else 0
        self._last = rows
        if self._rows and not (doubtful and _alike(rows, self._rows)):
            self._away += 1
            if self._spells:
                self._spells[0].settle = SETTLE
            if self._away > FORGET:
                self._forget()
            return
        self._away = 0
        if self._spells:
            self._count(tokens, seconds)
        elif self._rest:
            self._rest -= 1
        elif doubtful and self._steady >= SETTLE:
            self._begin(rows)

    def _begin(self, rows: int) -> None:
        self._rows = rows
        self._tokens, self._seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
        # The first and the last in equal parts, so that a speed that drifts, as contexts grow, favours neither.
        self._spells = [_Spell(True, SETTLE, MEASURED), _Spell(False, SETTLE, 2 * MEASURED)]
        self._spells.append(_Spell(True, SETTLE, MEASURED))

    def _count(self, tokens: int, seconds: float) -> None:
        spell = self._spells[0]
        if spell.settle:
            spell.settle -= 1
            return
        self._tokens[spell.drafts] += tokens
        self._seconds[spell.drafts] += seconds
        spell.left -= 1
        if not spell.left:
            del self._spells[0]
            if not self._spells:
                self._conclude()

    def _conclude(self) -> None:
        plain = self._tokens[False] * self._seconds[True]
        self.gain = self._tokens[True] * self._seconds[False] / plain - 1.0 if plain else 0.0
        pays = self.gain >= self._least
        self._next_rest = min(2 * self._next_rest, LONGEST_REST) if pays == self._pays else REST
        self._pays, self._rest = pays, self._next_rest

    def _forget(self) -> None:
        self._spells, self._rows, self._away, self._rest = [], 0, 0, 0
        self._pays, self._next_rest = True, REST


def _alike(one: int, other: int) -> bool:
    return other / LIKE <= one <= other * LIKE
