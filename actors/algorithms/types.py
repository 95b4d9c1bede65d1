"""Inputs and outputs of the decision algorithms. No torch, so that engines without arithmetic can use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import OutriderError
from actors.messages import Alternatives, Support
from actors.settings import Rule, SamplingSettings


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's share of a pass, as the acceptance rules see it.

    position: absolute position of the first token to be chosen (prompt length + tokens committed).
    prompt, output: the history at that position, for penalties.
    drafts: the k draft tokens; the logits hold k + 1 rows for this block.
    supports: q at each draft token for the probabilistic rules (one-hot where missing), empty otherwise.
    parents: of a tree of drafts (draft_tree.py), for the coupled rule and greedy decoding alone; a path has none.
    """

    sampling: SamplingSettings
    seed: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    drafts: Sequence[int] = ()
    supports: Sequence[Support] = ()
    rule: Rule = "coupled"
    eos: Sequence[int] = ()
    parents: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass decided for one block: the accepted draft tokens, then one correction or bonus token.

    path: the accepted nodes of a tree, from the root on; empty where a path was verified, whose first ones they are.
    margins (in units of logits) and alternatives are empty unless the request asks for them.
    error: no token can be chosen after `tokens` (they may be empty): the request ends here, the others go on.
    """

    tokens: tuple[int, ...]
    accepted: int
    alternatives: tuple[Alternatives, ...] = ()
    margins: tuple[float, ...] = ()
    error: OutriderError | None = None
    path: tuple[int, ...] = ()
