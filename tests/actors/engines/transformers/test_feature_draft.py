"""Drafts that read the target's hidden states: fed rightly they know them, fed wrongly or not at all they cost nothing
but acceptance."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import feature_models
import pytest
import torch
from feature_models import LAYERS
from small_llamas import EOS, VOCABULARY, causal_lm, full_logits, module, opening, some_tokens

from actors.algorithms.outcome_tree import Forest
from actors.algorithms.types import Block
from actors.algorithms.verification import verify_blocks
from actors.engines.protocol import Expand, Proposal, Row
from actors.engines.transformers.feature_draft import FeatureDraft
from actors.engines.transformers.feature_layer import FeatureModel, default_feature_layers
from actors.engines.transformers.features import NEWEST, FeatureTap, from_bytes, projection_name, to_bytes
from actors.engines.transformers.target import TransformersTarget
from actors.errors import ConfigError
from actors.features import Features
from actors.messages import OpenSequence, prefix_key
from actors.orchestrator.draft_routing import mismatch
from actors.settings import DraftSettings, TargetSettings, TreeSettings
from cluster.distillation.feature_student import UnrolledAttention, delayed

COUNT = 20
TREE = TreeSettings(width=6, branching=3, depth=5, nodes=24, min_reach=0.001)
Feed = Callable[[str, int, Features], Sequence[Features]]
"""From a sequence, the number of a pass and its features to what reaches the draft."""


def feature_model(seed: int = 0) -> FeatureModel:
    """Random, in float64, around the embedding and the head of small_llamas.module()."""
    return feature_models.feature_model(module(), seed)


def feature_draft(seed: int = 0) -> FeatureDraft:
    settings = DraftSettings(slots=8, context=128, prefill_chunk=16, tree=TREE)
    return feature_models.feature_draft(feature_model(seed), settings)


def feeding_target(seed: int = 0) -> TransformersTarget:
    settings = TargetSettings(slots=8, context=512)
    return feature_models.feeding_target(causal_lm(eos=(EOS,)), feature_model(seed), settings)


@torch.inference_mode()
def true_features(tokens: Sequence[int]) -> torch.Tensor:
    """[T, E], by one plain pass with transformers' own output of hidden states."""
    states = module()(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    fused: torch.Tensor = feature_model().fuse([states[n][0] for n in LAYERS])
    return fused


def close(features: Features, expected: torch.Tensor) -> None:
    """Within bfloat16's rounding: 8 bits of mantissa, so 2^-8 relative."""
    got = from_bytes(features)
    assert got is not None
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-6)


def test_what_the_target_sends_are_its_hidden_states_of_committed_positions() -> None:
    target, prompt = feeding_target(), some_tokens(9, 1)
    request = opening("a", prompt, temperature=0)
    target.attach(0, request)
    assert target.forward([Row(0, prompt[:5], 0, decide=False)]) == [None]
    first = target.forward([Row(0, prompt[5:], 5)])[0]
    assert first is not None
    assert first.features is not None
    assert (first.features.position, first.features.count) == (0, 9)  # both chunks of the prompt
    close(first.features, true_features(prompt))

    target.record(0, first.tokens)
    text = [*prompt, *first.tokens]
    next_token = int(full_logits(module(), text)[-1].argmax())
    wrong = (next_token + 1) % VOCABULARY
    proposal = Proposal((next_token, wrong), (0.5, 0.5))
    second = target.forward([Row(0, (text[-1], *proposal.tokens), 9, proposal)])[0]
    assert second is not None
    assert second.features is not None
    assert second.accepted == 1
    assert (second.features.position, second.features.count) == (9, 2)  # the wrong one is not among them
    close(second.features, true_features([*text, next_token])[9:])


def test_of_a_tree_the_path_that_came_true_is_sent() -> None:
    target, prompt = feeding_target(), some_tokens(9, 1)
    target.attach(0, opening("a", prompt, temperature=0))
    first = target.forward([Row(0, prompt, 0)])[0]
    assert first is not None
    target.record(0, first.tokens)
    text = [*prompt, *first.tokens]
    best = int(full_logits(module(), text)[-1].argmax())
    then = int(full_logits(module(), [*text, best])[-1].argmax())
    wrong = (best + 1) % VOCABULARY
    # The likely child is wrong; its sibling is right, and so is that one's second child.
    tree = Proposal((wrong, best, wrong, then), (0.5, 0.3, 0.2, 0.1), parents=(-1, -1, 1, 1))
    second = target.forward([Row(0, (text[-1], *tree.tokens), 9, tree)])[0]
    assert second is not None
    assert second.accepted == 2
    assert second.features is not None
    assert (second.features.position, second.features.count) == (9, 3)
    close(second.features, true_features([*text, best, then])[9:])


def test_rows_of_a_pass_get_their_own() -> None:
    target = feeding_target()
    prompts = [some_tokens(n, n) for n in (4, 7, 1)]
    for slot, prompt in enumerate(prompts):
        target.attach(slot, opening(f"s{slot}", prompt, temperature=0))
    outcomes = target.forward([Row(slot, prompt, 0) for slot, prompt in enumerate(prompts)])
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome is not None
        assert outcome.features is not None
        close(outcome.features, true_features(prompt))


def test_of_a_long_prompt_the_newest_are_sent() -> None:
    target, prompt = feeding_target(), some_tokens(NEWEST + 40, 1)
    target.attach(0, opening("a", prompt, temperature=0))
    target.forward([Row(0, prompt[:100], 0, decide=False)])
    outcome = target.forward([Row(0, prompt[100:], 100)])[0]
    assert outcome is not None
    assert outcome.features is not None
    assert (outcome.features.position, outcome.features.count) == (40, NEWEST)
    close(outcome.features, true_features(prompt)[40:])


def test_a_slot_forgets_the_sequence_before() -> None:
    target = feeding_target()
    target.attach(0, opening("a", some_tokens(6, 1), temperature=0))
    target.forward([Row(0, some_tokens(3, 1), 0, decide=False)])
    target.detach(0)
    target.attach(0, opening("b", some_tokens(6, 2), temperature=0))
    outcome = target.forward([Row(0, some_tokens(3, 2), 3)])[0]
    assert outcome is not None
    assert outcome.features is not None
    assert (outcome.features.position, outcome.features.count) == (3, 3)


@torch.inference_mode()
def expected_logits(tokens: Sequence[int], told: torch.Tensor, own_steps: int) -> torch.Tensor:
    """Logits after the last token: features `told` [N, E] for the first positions, own ones for the last `own_steps`.

    By training's passes over the whole text, which know nothing of slots.
    """
    draft = feature_model()
    ids, positions = torch.tensor([list(tokens)]), torch.arange(len(tokens))[None]
    features, attention = told[None], UnrolledAttention()
    for _ in range(own_steps + 1):
        features = draft(ids, positions, delayed(features), attention)
    logits: torch.Tensor = draft.score(features[0, -1])
    return logits


def test_fed_and_running_ahead_it_computes_what_training_does() -> None:
    draft, prompt = feature_draft(), some_tokens(7, 1)
    request = opening("a", prompt, temperature=0)
    draft.open(request)
    told = true_features(prompt[:-1]).to(torch.bfloat16)
    draft.read_features("a", Features(projection_name(LAYERS, feature_model().fc.weight), 0, 32, to_bytes(told)))
    path: list[int] = []
    for step in range(4):
        answer = draft.expand([Expand("a", tuple(path))])[0]
        features = torch.cat([told.double(), torch.zeros(1 + step, 32, dtype=torch.float64)])
        best = expected_logits((*prompt, *path), features, step).topk(3).indices.tolist()
        assert list(answer.tokens) == best, step
        path.append(best[0])
    assert draft.dropped == 0


def test_true_features_correct_what_was_drafted_without() -> None:
    """Told late, it says what one says that was told in time."""
    late, early, prompt = feature_draft(), feature_draft(), some_tokens(7, 1)
    request = opening("a", prompt, temperature=0)
    told = true_features(prompt[:-1]).to(torch.bfloat16)
    features = Features(projection_name(LAYERS, feature_model().fc.weight), 0, 32, to_bytes(told))
    for draft in (late, early):
        draft.open(request)
    early.read_features("a", features)
    blind = late.expand([Expand("a", ())])[0]
    assert blind.confidences != early.expand([Expand("a", ())])[0].confidences
    late.read_features("a", features)
    late.read_features("a", features)  # a repeated message
    corrected, timely = late.expand([Expand("a", ())])[0], early.expand([Expand("a", ())])[0]
    assert corrected.tokens == timely.tokens
    assert corrected.confidences == pytest.approx(timely.confidences, abs=1e-9)
    # Committed past what the tree holds, and corrected again: as if it had been told from the start.
    committed = (corrected.tokens[0], 50)
    text = (*prompt, *committed)
    more = true_features(text[:-1])[6:].to(torch.bfloat16)
    for draft in (late, early):
        draft.advance("a", committed)
        draft.read_features("a", replace(features, position=6, data=to_bytes(more)))
    answer = late.expand([Expand("a", ())])[0]
    told_all = torch.cat([told, more]).double()
    expected = expected_logits(text, torch.cat([told_all, torch.zeros(1, 32, dtype=torch.float64)]), 0)
    assert list(answer.tokens) == expected.topk(3).indices.tolist()


def test_useless_features_are_dropped_and_counted() -> None:
    draft, prompt = feature_draft(), some_tokens(7, 1)
    draft.open(opening("a", prompt, temperature=0))
    good = Features(projection_name(LAYERS, feature_model().fc.weight), 0, 32, to_bytes(torch.ones(6, 32).bfloat16()))
    nan = torch.ones(6, 32).bfloat16()
    nan[3, 3] = torch.nan
    useless = [
        replace(good, model="another"),
        replace(good, width=16),
        replace(good, dtype="float32"),
        replace(good, position=2),  # past what is committed
        replace(good, position=-1),
        replace(good, data=good.data[:-1]),
        replace(good, data=b""),
        replace(good, data=to_bytes(nan)),
    ]
    for features in useless:
        draft.read_features("a", features)
    assert draft.dropped == len(useless)
    draft.read_features("unknown", good)
    assert draft.dropped == len(useless)


def test_the_bytes_are_little_endian_bfloat16() -> None:
    assert to_bytes(torch.tensor([[1.0, -2.0]]).bfloat16()) == struct.pack("<HH", 0x3F80, 0xC000)


def test_a_draft_of_another_target_is_refused_by_its_card() -> None:
    target, other = feeding_target().card(), feature_draft(seed=1).card()
    assert mismatch(target, feature_draft().card()) is None
    assert "fused in another way" in str(mismatch(target, other))
    assert "not at all" in str(mismatch(replace(target, features=""), other))


def test_a_projection_of_another_width_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fc\.weight of shape \[32, 48\]"):
        FeatureTap(module(), LAYERS, torch.zeros(32, 48))
    with pytest.raises(ConfigError, match="no hidden state enters a layer 2"):
        FeatureTap(module(), (0, 2), torch.zeros(32, 64))


def test_default_layers() -> None:
    assert default_feature_layers(30) == (2, 15, 29)
    assert default_feature_layers(2) == (1,)


# -- draft and target in one loop ------------------------------------------------------------------------------------


def generate(requests: Sequence[OpenSequence], feed: Feed, steps: int = 3) -> tuple[dict[str, list[int]], int, int]:
    """Side by side until each has COUNT tokens. Returns them, how many drafts were accepted, how many dropped."""
    target, draft, forest, accepted = feeding_target(), feature_draft(), Forest(TREE), 0
    outputs: dict[str, list[int]] = {request.sequence: [] for request in requests}
    sampled: dict[int, tuple[int, float]] = {}
    cached = dict.fromkeys(outputs, 0)
    for slot, request in enumerate(requests):
        target.attach(slot, request)
        draft.open(request)
        forest.open(request.sequence, prefix_key(request.prompt), len(request.prompt))
    number = 0
    while running := [(s, r) for s, r in enumerate(requests) if len(outputs[r.sequence]) < COUNT]:
        names = {r.sequence: r for _, r in running}
        for _ in range(steps):
            answers = draft.expand([a for a in forest.frontier(TREE.width) if a.sequence in names])
            forest.grow(answers)
            for a in answers:
                if a.tokens:
                    key = prefix_key((*names[a.sequence].prompt, *outputs[a.sequence], *a.path))
                    sampled[key] = (a.tokens[0], a.confidences[0])
        rows = []
        for slot, request in running:
            text = (*request.prompt, *outputs[request.sequence])
            path = _path(sampled, text, min(3, COUNT - len(outputs[request.sequence]) - 1))
            start = cached[request.sequence]
            rows.append(Row(slot, (*text[start:], *path.tokens), start, path))
        number += 1
        for (_, request), row, outcome in zip(running, rows, target.forward(rows), strict=True):
            assert outcome is not None
            assert outcome.features is not None
            name = request.sequence
            length = len(request.prompt) + len(outputs[name])
            target.record(row.slot, outcome.tokens)
            outputs[name].extend(outcome.tokens)
            cached[name] = length + len(outcome.tokens) - 1
            accepted += outcome.accepted
            draft.advance(name, outcome.tokens)
            forest.commit(name, length, outcome.tokens)
            for features in feed(name, number, outcome.features):
                draft.read_features(name, features)
    return outputs, accepted, draft.dropped


def _path(sampled: dict[int, tuple[int, float]], text: Sequence[int], limit: int) -> Proposal:
    tokens: list[int] = []
    while len(tokens) < limit and (found := sampled.get(prefix_key((*text, *tokens)))):
        tokens.append(found[0])
    return Proposal(tuple(tokens), (0.5,) * len(tokens))


def plain(request: OpenSequence) -> list[int]:
    """By one full forward pass per token, without slots, drafts or cache."""
    output: list[int] = []
    for _ in range(COUNT):
        logits = full_logits(module(), (*request.prompt, *output))[-1:].clone()
        place = len(request.prompt) + len(output)
        block = Block(request.sampling, request.seed, place, request.prompt, output, eos=(EOS,))
        output.extend(verify_blocks(logits, [block])[0].tokens)
    return output


class Late:
    """Gives what came three passes ago."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Features]] = {}

    def __call__(self, sequence: str, number: int, features: Features) -> Sequence[Features]:
        kept = self._kept.setdefault(sequence, [])
        kept.append(features)
        return [kept.pop(0)] if len(kept) > 3 else []


def shuffled(sequence: str, number: int, features: Features) -> Sequence[Features]:
    found = from_bytes(features)
    assert found is not None
    order = torch.randperm(found.numel(), generator=torch.Generator().manual_seed(number))
    return [replace(features, data=to_bytes(found.flatten()[order].view(found.shape).bfloat16()))]


def nan(sequence: str, number: int, features: Features) -> Sequence[Features]:
    return [replace(features, data=to_bytes(torch.full((features.count, features.width), torch.nan).bfloat16()))]


FEEDS: dict[str, Callable[[], Feed]] = {
    "in time": lambda: lambda sequence, number, features: [features],
    "withheld": lambda: lambda sequence, number, features: [],
    "now and then": lambda: lambda sequence, number, features: [features] if number % 3 == 0 else [],
    "twice": lambda: lambda sequence, number, features: [features, features],
    "late": Late,
    "shuffled": lambda: shuffled,
    "nan": lambda: nan,
}


@pytest.mark.parametrize("how", FEEDS)
def test_whatever_it_is_fed_the_output_is_plain_decoding(how: str) -> None:
    requests = [
        opening("greedy", some_tokens(9, 1), temperature=0),
        opening("seeded", some_tokens(1, 2), 11, temperature=0.8),
        opening("hot", some_tokens(19, 3), 12, temperature=1.3, top_p=0.95),
    ]
    outputs, _, dropped = generate(requests, FEEDS[how]())
    for request in requests:
        assert outputs[request.sequence] == plain(request), request.sequence
    assert (dropped > 0) == (how == "nan")
