"""The draft that asks for one token per prefix ranks as the embedded draft does, for the ids that it is told of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from random_llama import random_llama
from transformers import LlamaForCausalLM

from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.vllm.draft import Scored, VllmDraft
from actors.errors import OverloadedError, PromptError, PromptTooLongError
from actors.messages import OpenSequence
from actors.settings import DraftSettings, Rule, SamplingSettings

VOCABULARY, CONTEXT = 64, 48


def llama() -> LlamaForCausalLM:
    return random_llama(VOCABULARY, intermediate_size=48).to(torch.float64)


class Told:
    """Answers from a plain forward pass, with the `count` best ids."""

    def __init__(self, count: int) -> None:
        self._model, self._count = llama(), count
        self.asked: list[int] = []

    @torch.inference_mode()
    def best(self, prefixes: Sequence[Sequence[int]]) -> list[Scored]:
        self.asked.append(len(prefixes))
        answers: list[Scored] = []
        for prefix in prefixes:
            row = self._model(input_ids=torch.tensor([list(prefix)])).logits[0, -1].log_softmax(-1)
            values, ids = row.topk(self._count)
            answers.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
        return answers


def settings(rule: Rule = "coupled", **changes: int) -> DraftSettings:
    return DraftSettings(slots=2, context=CONTEXT, rule=rule, **changes)


def draft(count: int = VOCABULARY, rule: Rule = "coupled") -> tuple[VllmDraft, Told]:
    told = Told(count)
    return VllmDraft(told, ModelCard("told", VOCABULARY, CONTEXT, 2), settings(rule)), told


def opening(name: str = "a", length: int = 5, **sampling: object) -> OpenSequence:
    return OpenSequence(name, tuple(range(3, 3 + length)), SamplingSettings(**sampling), 11)  # type: ignore[arg-type]


def close_to(one: Ranked, other: Ranked) -> bool:
    same = (one.sequence, one.path, one.tokens) == (other.sequence, other.path, other.tokens)
    return same and one.confidences == pytest.approx(other.confidences, abs=1e-9)


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        ({"temperature": 0.0}, "coupled"),
        ({"temperature": 0.9, "top_p": 0.9}, "coupled"),
        ({"temperature": 1.0, "frequency_penalty": 1.0}, "coupled"),
        ({"temperature": 1.0}, "rejection"),
    ],
)
def test_it_ranks_as_the_embedded_draft(sampling: dict[str, float], rule: Rule) -> None:
    ours, told = draft(rule=rule)
    embedded = TransformersDraft(CausalLM(llama(), name="llama"), settings(rule))
    for it in (ours, embedded):
        it.open(opening(**sampling))
    [root] = embedded.expand([Expand("a", ())])
    path = root.tokens[:1]
    asked = [Expand("a", path), Expand("a", root.tokens[1:2])]
    assert close_to(ours.expand([Expand("a", ())])[0], root)
    for one, other in zip(ours.expand(asked), embedded.expand(asked), strict=True):
        assert close_to(one, other)
    for it in (ours, embedded):
        it.advance("a", path)
    one, other = ours.expand([Expand("a", ())]), embedded.expand([Expand("a", ())])
    assert close_to(one[0], other[0])
    assert told.asked == [1, 2, 1]  # every call is one batch


def test_ids_it_is_not_told_of_are_not_proposed() -> None:
    ours, _ = draft(count=3)
    ours.open(opening(temperature=5.0))
    [ranked] = ours.expand([Expand("a", ())])
    assert len(ranked.tokens) == 3
    [whole] = draft()[0:1]
    whole.open(opening(temperature=0.0))
    ours.open(opening("b", temperature=0.0))
    [full], [few] = whole.expand([Expand("a", ())]), ours.expand([Expand("b", ())])
    assert few.confidences == pytest.approx(full.confidences[:3])  # it knows how much it does not know


def test_sequences_and_context_are_limited() -> None:
    ours, _ = draft()
    ours.open(opening("a"))
    ours.open(opening("b"))
    with pytest.raises(OverloadedError):
        ours.open(opening("c"))
    ours.close("a")
    ours.close("unknown")
    with pytest.raises(PromptTooLongError):
        ours.open(opening("c", length=CONTEXT + 1))
    with pytest.raises(PromptError):
        ours.open(OpenSequence("c", (VOCABULARY,), SamplingSettings(), 0))
    ours.open(opening("c", length=CONTEXT))
    assert ours.expand([Expand("c", ())]) == [Ranked("c", (), (), ())]
