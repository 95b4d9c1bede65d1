"""What a setting promises holds at every token of a long answer, whatever a draft proposes: on a small real model.

Each token is checked against a full forward pass over what came before it, without slots, blocks or cache.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from lossy_path import Answer, LossyPath
from on_off import ScriptedDrafts
from small_llamas import opening
from two_tokenizers import TARGET, llama, module

from actors.algorithms.grammar import GrammarCompiler
from actors.engines.protocol import DraftModel, Expand, ModelCard, Ranked
from actors.engines.transformers.target import TransformersTarget
from actors.messages import OpenSequence
from actors.settings import LookaheadSettings, Rule, TargetSettings

PROMPT = TARGET.encode("the cat sat")
RULES: list[Rule] = ["coupled", "rejection", "block"]


class Insists:
    """Implements protocol.DraftModel: proposes a script over and over, whatever is committed."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self._lengths: dict[str, int] = {}

    def card(self) -> ModelCard:
        return ModelCard("insists", 0, 4096, 64)

    def open(self, opening: OpenSequence) -> None:
        self._lengths[opening.sequence] = 0

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self._lengths[sequence] += len(tokens)

    def close(self, sequence: str) -> None:
        del self._lengths[sequence]

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        return [Ranked(r.sequence, r.path, (self._token(r),), (0.9,)) for r in requests]

    def _token(self, request: Expand) -> int:
        return self._script[(self._lengths[request.sequence] + len(request.path)) % len(self._script)]


def answers(
    openings: Sequence[OpenSequence], draft: DraftModel | None = None, rule: Rule = "coupled", seed: int = 0
) -> list[Answer]:
    """Of the real path, at lookahead 4."""
    lookahead = LookaheadSettings(mode="fixed", maximum=4)
    settings = TargetSettings(slots=16, context=256, rule=rule, lookahead=lookahead, queue=64)
    compiler = GrammarCompiler(TARGET._tokenizer.backend_tokenizer.to_str(), TARGET.vocabulary, (0,))
    target = TransformersTarget(llama(TARGET, 0), settings, compiler)
    return list(LossyPath(target, draft, settings, random.Random(seed)).run(openings).values())


def scripted(openings: Sequence[OpenSequence], given: Sequence[Answer]) -> ScriptedDrafts:
    """A Twin for the first, a Foe for the second, a Rigged draft for the third, and so on."""
    scripts: dict[str, Sequence[int]] = {o.sequence: a.tokens for o, a in zip(openings, given, strict=True)}
    return ScriptedDrafts(scripts, TARGET.vocabulary, random.Random(1))


@torch.inference_mode()
def rows(tokens: Sequence[int]) -> torch.Tensor:
    """Logits [len(tokens), V] that each token of an answer was chosen from."""
    text = torch.tensor([[*PROMPT, *tokens]])
    logits: torch.Tensor = module(TARGET, 0)(input_ids=text, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits


@pytest.mark.parametrize("rule", RULES)
def test_a_token_biased_away_never_comes(rule: Rule) -> None:
    """The commonest token of an unbiased answer, which the drafts go on proposing."""
    free = answers([opening("s", PROMPT, temperature=1.0, max_tokens=200, ignore_eos=True)])[0].tokens
    common = Counter(free).most_common(1)[0][0]
    asked = [
        opening(f"s{n}", PROMPT, n, logit_bias={common: -100.0}, max_tokens=200, ignore_eos=True) for n in range(3)
    ]
    for answer in answers(asked, Insists([common]), rule):
        assert len(answer.tokens) == 200
        assert common not in answer.tokens


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_every_token_is_of_the_kept_set(rule: Rule, fields: dict[str, float]) -> None:
    asked = [opening(f"s{n}", PROMPT, n, max_tokens=100, ignore_eos=True, **fields) for n in range(3)]
    for answer in answers(asked, scripted(asked, answers(asked)), rule):
        p = rows(answer.tokens).softmax(-1)
        of_token = p.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        above = torch.where(p > of_token[:, None], p, 0.0)
        if "top_k" in fields:
            assert int((above > 0).sum(-1).max()) < 2
        elif "top_p" in fields:
            assert float(above.sum(-1).max()) < 0.7
        else:
            assert bool((of_token >= 0.3 * p.amax(-1) - 1e-12).all())


def test_a_seed_is_an_answer() -> None:
    """Five times the same at temperature 2, under other losses and other drafts; twenty seeds give twenty answers
    (that any two agree on 16 tokens here has odds below 1e-9)."""
    same = [opening("s", PROMPT, 42, temperature=2.0, max_tokens=16)]
    (first,) = answers(same)
    drafts = [scripted(same, [first]), Insists([7]), Insists(first.tokens[:3]), None]
    for seed, draft in enumerate(drafts):
        assert answers(same, draft, seed=seed)[0].tokens == first.tokens
    many = answers([opening(f"s{n}", PROMPT, n, temperature=2.0, max_tokens=16) for n in range(20)])
    assert len({tuple(answer.tokens) for answer in many}) == 20


def test_log_probabilities_are_the_models_own_at_each_token() -> None:
    asked = [opening(f"s{n}", PROMPT, n, logprobs=5, top_k=9, max_tokens=40, ignore_eos=True) for n in range(3)]
    for answer in answers(asked, scripted(asked, answers(asked))):
        expected = rows(answer.tokens).log_softmax(-1)
        assert len(answer.alternatives) == len(answer.tokens) == 40
        for own, row, token in zip(answer.alternatives, expected, answer.tokens, strict=True):
            assert own.logprob == pytest.approx(float(row[token]), abs=1e-3)
            best = row.topk(5)
            assert [id_ for id_, _ in own.top] == best.indices.tolist()
            assert [value for _, value in own.top] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_json_parses_though_the_draft_writes_code_fences(rule: Rule) -> None:
    from llguidance import LLMatcher

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    asked = [opening(f"s{n}", PROMPT, n, grammar=grammar, max_tokens=80) for n in range(6)]
    plain = answers(asked, None, rule)
    fences = list(TARGET.encode('```json\n{"a": 1, "b": true}\n```', special=False))
    got = answers(asked, Insists(fences), rule)
    for reference, answer in zip(plain, got, strict=True):
        assert (answer.finish, reference.finish) == ("stop", "stop")
        told = json.loads(TARGET.decode(answer.tokens))
        assert set(told) == {"a", "b"}
        if rule == "coupled":
            assert answer.tokens == reference.tokens
