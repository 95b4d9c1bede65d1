"""What the choice of a lookahead may see of one sequence's draft tokens: the next one's confidence, and no more.

Why: under the rules that draw draft tokens from q (rejection, block), a committed token follows p only if *whether*
position i is verified is settled by the tokens before i and by q_i as a distribution. Had the token X_i drawn there, or
anything behind it, a say, those passes that verify would see more of some tokens than q holds, and accept or correct
them with the wrong odds; and so would later passes, because a draw that was not verified stays, and serves once its
prefix is committed. In the terms of probability: k + 1 must be a stopping time of the path that is walked token by
token. Token-wise rejection is exact then, position by position. So is block verification: by induction from the end of
a path, P(tau >= i | X_1..X_i) is p_i both where the path ends at i and where it goes on, wherever it ends behind i
(Sun et al., ICLR 2025, the proof of theorem 1, with a k for each path).

How: a `DraftPath` shows `reach`, which counts the confidence of the next token alone, the expected value over its draw
(drafting.expected_confidences). What is behind is shown by `take`, and a token that was taken is verified, without a
way back. Whatever a controller does with such paths is a stopping time. It cannot verify half of what it chose, nor
weigh what it did not choose; what it wants less of, it must limit beforehand.

Sequences in one pass compete, and may: what decides over one of them are the tokens that it has shown and those of its
neighbours, whose draws have noise of their own. The same holds for all that a pass leaves behind (cost, trust, gain,
trials): it was made of tokens that were taken, and of the confidences of first tokens, which the committed prefix
fixes. Whether X_i is at hand when a pass forms depends on when its prefix was expanded, that is, on draws before it.

How far a *neighbour's* tree is grown must not follow from draws that are not verified yet either: a neighbour's token
at hand may raise the bar of the pass, and the bar may decide over the draw. Draft replicas therefore share their width
by what committed prefixes fix alone (OutcomeTree._odds).

The coupled rule and greedy decoding commit the same tokens whatever is verified, so an `OpenPath` shows all it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


class DraftPath:
    """A path whose tokens are taken one by one.

    confidences: per token, the chance that it is accepted given that those before it are.
    """

    __slots__ = ("_reach", "taken")

    def __init__(self, confidences: Sequence[float]) -> None:
        self._reach = list(accumulate(confidences, mul))
        self.taken = 0
        """Tokens that the pass verifies."""

    @property
    def reach(self) -> float:
        """The chance that the next token and all before it are accepted; 0 where the path ends."""
        return self._reach[self.taken] if self.taken < len(self._reach) else 0.0

    def take(self) -> None:
        """Verify the next token. There must be one."""
        if self.taken == len(self._reach):
            raise IndexError("the path has ended")
        self.taken += 1

    def prospect(self, depth: int) -> DraftPath:
        """What may be expected of the path without taking any of it: as confident as the first token, `depth` deep.

        How many tokens there are does not count: how far a draft comes depends on what it drew.
        """
        return DraftPath((self._reach[0],) * depth if self._reach else ())


class OpenPath(DraftPath):
    """A path of which everything may be seen: no draw decides over what is committed."""

    __slots__ = ()

    def prospect(self, depth: int) -> DraftPath:
        """The path itself, from its first token on, `depth` deep at most."""
        return self.over(self._reach[:depth])

    @classmethod
    def over(cls, reach: Sequence[float]) -> OpenPath:
        """Of tokens that are accepted with these chances, none of which is above the one before it: those of a path,
        or the nodes of a tree from the best one on."""
        path = cls(())
        path._reach = list(reach)
        return path
