"""Structured output inside blocks: masks at every position, rollback, and the end of an answer."""

from __future__ import annotations

import json
import random

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_models import Request, ToyModel

from actors.algorithms.grammar import GrammarCompiler, GrammarMatcher
from actors.errors import EngineError, InvalidSettingError
from actors.settings import Rule, SamplingSettings

EOS = 256
V = 260
"""256 bytes, end of text, and three ids that the tokenizer lacks."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)} | {"<eos>": EOS}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str(), V, [EOS])


def schema_matcher(compiler: GrammarCompiler, schema: object = SCHEMA) -> GrammarMatcher:
    return compiler.matcher(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def allowed(matcher: GrammarMatcher, tokenizer: Tokenizer, path: list[int]) -> set[str]:
    ids = matcher.mask(path).nonzero()[:, 0].tolist()
    return {"<eos>" if token == EOS else tokenizer.decode([token]) for token in ids} - set(" \n\t\r")


def test_masks_along_a_path_and_back(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = schema_matcher(compiler)
    path = tokenizer.encode('{"a":"yy","n":7}').ids
    assert allowed(matcher, tokenizer, []) == {"{"}
    assert allowed(matcher, tokenizer, path[:6]) == {"x", "y"}
    assert allowed(matcher, tokenizer, path[:5]) == {'"'}
    assert allowed(matcher, tokenizer, path[:7]) == {"y"}
    assert allowed(matcher, tokenizer, path[:15]) == {*"0123456789", "}"}
    assert allowed(matcher, tokenizer, path) == {"<eos>"}
    assert allowed(matcher, tokenizer, [*path, EOS]) == {"<eos>"}
    assert allowed(matcher, tokenizer, path[:6]) == {"x", "y"}
    assert allowed(matcher, tokenizer, tokenizer.encode('{"b').ids) == set()
    assert allowed(matcher, tokenizer, []) == {"{"}


def test_committed_tokens_are_not_rolled_back(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = schema_matcher(compiler)
    path = tokenizer.encode('{"a":"x"').ids
    matcher.mask(tokenizer.encode('{"a":"yy').ids)
    matcher.advance(path[:6])
    matcher.advance(path[6:])
    assert allowed(matcher, tokenizer, []) == {","}
    rest = tokenizer.encode(',"n":12}').ids
    assert allowed(matcher, tokenizer, rest) == {"<eos>"}
    matcher.advance([*rest, EOS])
    assert allowed(matcher, tokenizer, []) == {"<eos>"}
    assert allowed(matcher, tokenizer, [EOS]) == {"<eos>"}


def test_end_of_text_where_the_grammar_could_go_on(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(LLMatcher.grammar_from_regex("a{2,5}"))
    path = tokenizer.encode("aa").ids
    assert allowed(matcher, tokenizer, path) == {"a", "<eos>"}
    assert allowed(matcher, tokenizer, [*path, EOS]) == {"<eos>"}
    assert allowed(matcher, tokenizer, [*path, EOS, path[0]]) == set()
    assert allowed(matcher, tokenizer, [*path, path[0]]) == {"a", "<eos>"}


def test_committing_what_is_not_allowed_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(EngineError):
        schema_matcher(compiler).advance(tokenizer.encode("[").ids)


@pytest.mark.parametrize(
    "grammar",
    ["no grammar", LLMatcher.grammar_from_json_schema('{"type": "string", "minLength": 5, "maxLength": 2}'), ""],
)
def test_impossible_grammars_are_refused(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        compiler.matcher(grammar)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["fences", "twin", "mixed"])
def test_blocks_follow_the_grammar_as_plain_decoding_does(
    compiler: GrammarCompiler, tokenizer: Tokenizer, temperature: float, draft: str
) -> None:
    """Field case 7 at function level: drafts of code fences, right drafts, and some of each; the answer parses and is
    the plain one."""
    fences = tokenizer.encode('```json\n{"a": "x", "n": 3}').ids
    for seed in range(4):
        request = Request(ToyModel(V, seed=seed), SamplingSettings(temperature=temperature), seed, [1], eos=(EOS,))
        reference = decode(compiler, request, lambda output: [])
        rng = random.Random(seed)

        def guess(output: list[int], reference: list[int] = reference, rng: random.Random = rng) -> list[int]:
            right = reference[len(output) : len(output) + rng.randrange(6)]
            if draft == "twin":
                return right
            return fences[:6] if draft == "fences" or rng.random() < 0.5 else [*right, *fences[:2]]

        assert decode(compiler, request, guess) == reference
        text = tokenizer.decode(reference[:-1])
        assert reference[-1] == EOS
        answer = json.loads(text)
        assert answer["a"] in ("x", "yy")
        assert 0 <= answer["n"] <= 99


def decode(compiler: GrammarCompiler, request: Request, guess: object) -> list[int]:
    matcher = schema_matcher(compiler)
    output: list[int] = []
    for _ in range(400):
        if EOS in output:
            break
        drafts = guess(output)  # type: ignore[operator]
        outcome = request.verify(output, drafts, grammar=matcher)
        assert outcome.error is None
        tokens = list(outcome.tokens)
        tokens = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        matcher.advance(tokens)
        output += tokens
    return output


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_every_rule_keeps_to_the_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer, rule: Rule) -> None:
    request = Request(ToyModel(V), SamplingSettings(), 3, [1], rule=rule, eos=(EOS,))
    wanted = tokenizer.encode('{"a":"x","n":5}').ids
    json.loads(tokenizer.decode(decode(compiler, request, lambda output: wanted[len(output) : len(output) + 4])[:-1]))


def test_a_grammar_that_min_tokens_contradicts_ends_the_request(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher(LLMatcher.grammar_from_regex("ab"))
    request = Request(ToyModel(V), SamplingSettings(min_tokens=5), 3, [1], eos=(EOS,))
    outcome = request.verify([], tokenizer.encode("ab").ids, grammar=matcher)
    assert tokenizer.decode(list(outcome.tokens)) == "ab"
    assert isinstance(outcome.error, InvalidSettingError)
    assert outcome.error.param == "response_format"
    assert "min_tokens" in str(outcome.error)


def test_masks_have_the_size_of_the_logits(compiler: GrammarCompiler) -> None:
    mask = schema_matcher(compiler).mask([])
    assert mask.shape == (V,)
    assert mask.dtype == torch.bool
    assert not mask[EOS + 1 :].any()
