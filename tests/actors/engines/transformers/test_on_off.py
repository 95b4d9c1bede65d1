"""On equals off, token for token, on a small Llama in float64: a fast version of `make proof-model`."""

from __future__ import annotations

import random

import pytest
from feature_models import feature_draft, feature_model, feeding_target
from on_off import sweep
from two_tokenizers import DRAFT, TARGET, llama

from actors.algorithms.grammar import GrammarCompiler
from actors.engines.lookup.prompt_lookup import PromptLookupDraft
from actors.engines.protocol import DraftModel
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.transformers.retokenised_draft import RetokenisedDraft
from actors.engines.transformers.target import TransformersTarget
from actors.settings import DraftSettings, TargetSettings, TreeSettings

TOKENS = 12


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return small_target()


def small_target() -> TransformersTarget:
    backend = TARGET._tokenizer.backend_tokenizer
    grammars = GrammarCompiler(backend.to_str(), TARGET.vocabulary, (0,))
    return TransformersTarget(llama(TARGET, 0), TargetSettings(slots=16, context=96), grammars)


def grammars() -> list[str]:
    from llguidance import LLMatcher

    return [
        LLMatcher.grammar_from_json_schema('{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        LLMatcher.grammar_from_regex("( the| cat)+ sat\\."),
    ]


def prompts(count: int, rng: random.Random) -> list[tuple[int, ...]]:
    return [tuple(rng.randrange(2, TARGET.vocabulary) for _ in range(rng.randrange(1, 12))) for _ in range(count)]


def test_every_setting_alone_and_combined(target: TransformersTarget) -> None:
    """400 prompts, drafts right, wrong and rigged, any part of their trees, offers late, lost and twice."""
    rng = random.Random(3)
    found = sweep(target, prompts(400, rng), rng, tokens=TOKENS, grammars=grammars())
    assert found.tally.same, found.tally.different
    assert found.tally.ties == 0
    assert found.lookaheads == set(range(6))
    assert found.accepted > 400
    assert found.proposed - found.accepted > 200
    assert found.branches > 200


def test_a_draft_that_reads_hidden_states() -> None:
    """Features come late, twice or not at all, with trees and paths cut at random."""
    model = llama(TARGET, 0)
    draft = feature_model(model.module)
    target = feeding_target(model, draft, TargetSettings(slots=16, context=96))
    settings = DraftSettings(slots=16, context=256, tree=TreeSettings(width=32, branching=2, depth=5, nodes=24))
    rng = random.Random(5)
    engine = feature_draft(draft, settings, eos=(0,))
    found = sweep(target, prompts(120, rng), rng, tokens=TOKENS, draft=lambda _: engine)
    assert found.tally.same, found.tally.different
    assert found.tally.ties == 0
    assert found.proposed > 100
    assert engine.dropped == 0
    assert engine.told > 100


@pytest.mark.parametrize("kind", ["retokenised", "early exit", "lookup"])
def test_other_drafts(target: TransformersTarget, kind: str) -> None:
    """A draft with another tokenizer, one layer of the target's two, and none at all."""
    tree = TreeSettings(width=32, branching=2, depth=5, nodes=24)
    settings = DraftSettings(slots=16, context=256, tree=tree)

    def draft(_: object) -> DraftModel:
        if kind == "lookup":
            return PromptLookupDraft(settings)
        if kind == "early exit":
            model = llama(TARGET, 0).module
            model.model.layers = model.model.layers[:1]
            model.config.num_hidden_layers = 1
            return TransformersDraft(CausalLM(model, name="exit", eos=(0,)), settings)
        return RetokenisedDraft(llama(DRAFT, 5), settings, target=TARGET, draft=DRAFT, eos=0)

    rng = random.Random(4)
    found = sweep(target, prompts(60, rng), rng, tokens=TOKENS, grammars=grammars(), draft=draft)
    assert found.tally.same, found.tally.different
    assert found.tally.ties == 0
    assert found.proposed > 10
