"""A draft on a real vLLM in front of a plain target: what it proposes is what the embedded draft would."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm_stack import CONTEXT, EOS, VOCABULARY, checkpoint, module, prompts

from actors.engines.protocol import Expand, ModelCard
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.vllm.draft import VllmDraft, VllmNextTokens
from actors.messages import OpenSequence
from actors.settings import DraftSettings, SamplingSettings

SETTINGS = DraftSettings(slots=8, context=CONTEXT)


def test_vllm_ranks_as_the_embedded_draft(tmp_path: Path) -> None:
    """Eight sequences, a node and its child in one step, again after a commit; near-ties may change places."""
    told = VllmNextTokens(checkpoint(tmp_path), "float32", SETTINGS, {"enforce_eager": True})
    ours = VllmDraft(told, ModelCard("vllm", told.vocabulary, CONTEXT, 8, (EOS,)), SETTINGS)
    embedded = TransformersDraft(CausalLM(module(), name="embedded", eos=(EOS,)), SETTINGS)
    assert told.vocabulary == VOCABULARY
    names = [f"s{i}" for i in range(8)]
    for i, (name, prompt) in enumerate(zip(names, prompts(8), strict=True)):
        opening = OpenSequence(name, prompt, SamplingSettings(temperature=0.0), seed=i)
        ours.open(opening)
        embedded.open(opening)
    compared = 0
    for _ in range(3):
        roots = {ranked.sequence: ranked for ranked in embedded.expand([Expand(name, ()) for name in names])}
        asked = [Expand(n, p) for n in names for p in ((), roots[n].tokens[:1], roots[n].tokens[1:2])]
        expected = {(r.sequence, r.path): r for r in embedded.expand(asked)}
        for ranked in ours.expand(asked):
            other = expected[ranked.sequence, ranked.path]
            assert torch.allclose(torch.tensor(ranked.confidences), torch.tensor(other.confidences), atol=1e-3)
            if other.confidences[0] - other.confidences[1] > 1e-3:
                assert ranked.tokens[0] == other.tokens[0]
                compared += 1
        for name in names:
            for draft in (ours, embedded):
                draft.advance(name, roots[name].tokens[:1])
    assert compared > 60  # of 72
