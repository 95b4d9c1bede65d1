"""Inputs of the decision algorithms; what comes out is a VerificationResult (messages.py).

No torch, so that engines without arithmetic can use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.messages import Support
from actors.settings import Rule, SamplingSettings


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's share of a pass, as the acceptance rules see it.

    sequence: whose share it is, for whoever gets the result.
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
    sequence: str = ""
