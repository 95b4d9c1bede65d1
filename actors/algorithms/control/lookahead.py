"""How many draft tokens of each sequence a pass verifies, and how long a pass is worth holding for drafts.

Both answers maximise expected committed tokens per second of the target. A draft token is verified if what it adds
(the probability that it and all before it are accepted) exceeds what its share of the pass could commit elsewhere;
under load that bar rises to one and speculation ends by itself. (Goodput, as in Liu et al., "Optimizing speculative
decoding for serving large language models using goodput", 2024, per token instead of per batch.)

Pure: seconds come in as arguments. Knows nothing of engines, mailboxes or links.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from actors.algorithms.control.cost import PassCost
from actors.algorithms.control.hold_policy import HoldPolicy
from actors.algorithms.control.payoff import Payoff
from actors.algorithms.draft_path import DraftPath, OpenPath
from actors.algorithms.draft_tree import depths, reaches
from actors.settings import LookaheadSettings, Rule


def choose(paths: Sequence[DraftPath], cost: PassCost, plain_tokens: int, most: int | None = None) -> float:
    """Take of each path what maximises expected committed tokens per second of one pass. Returns the expected gain.

    plain_tokens: in the pass without any draft, not counting chunks of prompts: one for each sequence that decodes,
        with drafts or without, and commits one. Prompts are work that must be done sometime, at its own price, and
        commits nothing yet: counted as time of this pass, it would make a commit look dear and drafts worth verifying
        that are not, which delays all the prompts behind it.
    most: draft tokens in the whole pass, fixed before any was seen.

    The gain is expected tokens per second over those of the pass without any draft, less one. A path's next token is
    taken if it commits more per second than the pass does so far: the most likely one of all paths first, so that what
    is taken of a path depends on nothing behind it.
    """
    plain = cost(plain_tokens)
    committed, seconds, slope = float(plain_tokens), plain, cost.slope
    heads = [(-path.reach, i) for i, path in enumerate(paths)]
    heapq.heapify(heads)
    left = math.inf if most is None else most
    while heads and left > 0:
        gain, i = -heads[0][0], heads[0][1]
        if gain <= 0.0 or gain * seconds < committed * slope:
            break
        path = paths[i]
        path.take()
        committed += gain
        seconds += slope
        left -= 1
        heapq.heapreplace(heads, (-path.reach, i))
    return committed / plain_tokens * plain / seconds - 1.0 if paths and plain > 0.0 else 0.0


OFF_BELOW = 0.02
"""Expected gain below which nothing is verified: drafts, and asking for them, are not free either."""
_GAIN_RATE = 0.2
_FIRST_GAIN = 0.2
"""Expected before anything is known; without any gain, nothing is verified after ten passes with drafts at hand."""

DOUBTFUL_BELOW = 0.25
"""Expected gain below which it is tried out what drafts cost beside the pass (payoff.py)."""

PROBE = 64
"""Passes of like size after which one of another size is run: without, the cost of a token could not be told."""


NO_TREES: Mapping[str, Sequence[int]] = {}

Phase = Literal["usual", "off", "probing", "trying"]
"""trying: on or off, to find out by the wall clock which is better (payoff.py)."""


class _Trust:
    """How far one sequence keeps what its confidences promise: accepted over promised, with a prior and forgetting."""

    __slots__ = ("kept", "promised")

    PRIOR = 8.0
    MEMORY = 0.97

    def __init__(self) -> None:
        self.kept = self.promised = 0.0

    def factor(self) -> float:
        return (self.PRIOR + self.kept) / (self.PRIOR + self.promised)

    def fade(self) -> None:
        """Without news, the next proposal gets a fresh chance in time."""
        self.kept *= self.MEMORY
        self.promised *= self.MEMORY

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        for confidence in confidences[: accepted + 1]:
            self.promised += confidence
        self.kept += accepted


class LookaheadController:
    """Decides for one target replica. Used from its model thread.

    rule: the target's; what may be seen of drafts depends on it (draft_path.py).
    probe_after: passes of like size before a probe.
    """

    def __init__(self, settings: LookaheadSettings, rule: Rule, probe_after: int = PROBE) -> None:
        self.cost = PassCost()
        self._settings = settings
        self._path = OpenPath if rule == "coupled" else DraftPath
        self._trust: dict[str, _Trust] = {}
        self._waiting = HoldPolicy(None if settings.max_wait_ms is None else settings.max_wait_ms / 1e3)
        self._accepted = self._tried = self._branches = 0
        self._usual_tokens = 0.0
        self._probe_after = probe_after
        self._alike = probe_after - 4
        self._gain = _FIRST_GAIN
        self._payoff = Payoff(OFF_BELOW)
        self._bar = 0.0
        """Reach at which a token committed just what its place in a pass was worth, lately."""

    # -- lookahead -----------------------------------------------------------------------------------------------

    @property
    def is_off(self) -> bool:
        """None is verified for now: of the drafts at hand for the last few passes, hardly any were worth it, or it was
        tried out that they do not pay."""
        return self._gain < OFF_BELOW or not self._payoff.allows

    @property
    def phase(self) -> Phase:
        """What the next pass is for. Known before its drafts are: it decides what becomes of them."""
        if self._payoff.is_trying:
            return "trying"
        if self._alike >= self._probe_after:
            return "probing"
        return "off" if self.is_off else "usual"

    def plan(
        self,
        paths: Mapping[str, Sequence[float]],
        plain_tokens: int,
        trees: Mapping[str, Sequence[int]] = NO_TREES,
    ) -> dict[str, int]:
        """Lookahead of each sequence in the pass that is formed now: how many of its draft tokens are verified.

        paths: confidences of the draft tokens at hand. plain_tokens: tokens in the pass without any of them, not
        counting chunks of prompts: one for each sequence that decodes. trees: the parents of those draft tokens that
        are trees, best nodes first (coupled rule and adaptive mode only); see draft_tree.py.
        """
        settings = self._settings
        if settings.mode != "adaptive":
            limit = settings.maximum if settings.mode == "fixed" else self._scheduled(len(paths))
            self._expect(paths, float(limit > 0))
            return {name: min(len(path), limit) for name, path in paths.items()}
        depth = settings.maximum
        views = [
            self._tree(name, path, trees[name]) if name in trees else self._path(self._trusted(name, path[:depth]))
            for name, path in paths.items()
        ]
        prospects = [view.prospect(max(depth, settings.tree)) for view in views]
        self._expect(paths, choose(prospects, self.cost, plain_tokens))
        if self.phase == "probing":
            self._probe(views, plain_tokens)
        elif not self.is_off:
            if self._path is OpenPath:
                views = prospects  # chosen with all in sight already
            else:
                choose(views, self.cost, plain_tokens)
        return {name: view.taken for name, view in zip(paths, views, strict=True)}

    def _expect(self, paths: Mapping[str, Sequence[float]], expected: float) -> None:
        """Only passes with drafts at hand tell what drafts are worth."""
        if any(paths.values()):
            self._gain += _GAIN_RATE * (expected - self._gain)

    def _probe(self, views: Sequence[DraftPath], plain_tokens: int) -> None:
        """A pass of another size: over half the usual draft tokens, or, where none are usual, over as many as would
        make it half as large again, the first ones of each path first.

        The size is fixed before anything is seen. One such pass is enough, however little it differs: how much of the
        cost of a token can be told from it is for the fit to say, and another right after it would tell no more.
        """
        usual = round(self._usual_tokens) - plain_tokens
        if usual > 0:
            self._alike = -1  # the probe itself is not one of them
            if not self.is_off:
                choose(views, self.cost, plain_tokens, most=usual // 2)
            return
        left = max(1, plain_tokens // 2)
        while left > 0 and (offered := [view for view in views if view.reach > 0.0]):
            self._alike = -1
            for view in offered[:left]:
                view.take()
            left -= len(offered)

    def _scheduled(self, batch: int) -> int:
        steps = [size for size in self._settings.schedule if size <= batch]
        return min(self._settings.schedule[max(steps)] if steps else self._settings.maximum, self._settings.maximum)

    def _trusted(self, name: str, path: Sequence[float]) -> Sequence[float]:
        trust = self._trust.get(name)
        if trust is None:
            return path
        trust.fade()
        factor = trust.factor()
        return [min(1.0, factor * confidence) for confidence in path]

    @property
    def least_reach(self) -> float:
        """Nodes below this need not be looked at: far less likely than any that was worth verifying lately."""
        return 0.5 * self._bar

    def _tree(self, name: str, confidences: Sequence[float], parents: Sequence[int]) -> DraftPath:
        """Its nodes, whose chances count as far as those of this sequence are kept."""
        reach = reaches(confidences, parents)
        trust = self._trust.get(name)
        if trust is not None:
            trust.fade()
            factor = trust.factor()
            trusted = [min(1.0, r * factor**depth) for r, depth in zip(reach, depths(parents), strict=True)]
            reach = list(accumulate(trusted, min))  # cut in the order in which they come
        return OpenPath.over(reach)

    def observe_block(self, sequence: str, confidences: Sequence[float], accepted: int, branches: int = 0) -> None:
        """Of a proposal with these confidences, the first `accepted` tokens were accepted.

        Of a tree, they are the chances that one of the children comes true, at each node that was come to
        (draft_tree.branch_chances), and `branches` of those that did were not the most likely ones.
        """
        self._trust.setdefault(sequence, _Trust()).observe(confidences, accepted)
        self._accepted += accepted
        self._branches += branches
        self._tried += min(accepted + 1, len(confidences))

    def observe_pass(self, tokens: int, rows: int, seconds: float, prompt_tokens: int = 0) -> None:
        """A pass of `rows` sequences took `seconds`, over `tokens` tokens and `prompt_tokens` ones of prompts."""
        if tokens + prompt_tokens > 0 and seconds > 0:
            self.cost.observe(tokens, seconds, prompt_tokens)
            usual = self._usual_tokens or tokens  # 0 until a pass was over more than a part of a prompt
            alike = usual > 0 and 0.75 < tokens / usual < 1.33
            self._alike = self._alike + 1 if alike else 0
            self._usual_tokens += 0.2 * (tokens - self._usual_tokens) if self._usual_tokens else tokens
            bar = self.cost.slope * (rows + self._accepted) / seconds
            self._bar += 0.2 * (bar - self._bar)
            self._waiting.end_pass(rows, self._accepted, self._tried, seconds, self._branches)
        self._accepted = self._tried = self._branches = 0

    def observe_progress(self, rows: int, tokens: int, seconds: float, *, full: bool) -> None:
        """Passes without a pause in between: one ended `seconds` after the one before it, by the wall clock.

        For engines whose time between passes counts too. rows: sequences that committed; tokens: what they committed.
        full: the engine is loaded so far that throughput counts, and trying is soon made up for.
        """
        doubtful = full and self._settings.mode == "adaptive" and OFF_BELOW <= self._gain < DOUBTFUL_BELOW
        self._payoff.observe(rows, tokens, seconds, doubtful)

    def forget(self, sequence: str) -> None:
        """The sequence has ended."""
        self._trust.pop(sequence, None)
        self._waiting.forget(sequence)

    # -- waiting -------------------------------------------------------------------------------------------------

    def hold(self, now: float, ready: Mapping[str, int], plain: int) -> float:
        """Seconds that the pass about to be formed is worth holding from `now` on; 0 means go.

        ready: draft tokens at hand, for each sequence that could use some. plain: other sequences in the pass.
        To be asked again whenever drafts arrive. All holds before one pass add up to at most a usual pass, and to at
        most max_wait_ms where that is set. Nothing is held while nothing is verified.
        """
        settings = self._settings
        limit = self._scheduled(len(ready) + plain) if settings.mode == "scheduled" else settings.maximum
        if settings.wait == "never" or not ready or limit == 0 or (settings.wait == "adaptive" and self.is_off):
            return 0.0
        demanded = {"adaptive": 0, "bounded": 1, "full": limit}[settings.wait]
        return self._waiting.hold(now, ready, limit, self.cost.slope, demanded)

    def observe_offer(self, now: float, sequence: str) -> None:
        """Drafts for `sequence` arrived at `now`."""
        self._waiting.offer(sequence)
