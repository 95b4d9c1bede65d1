"""The demo pair in float32: slots against transformers' own cache and generate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from small_llamas import opening

from actors.engines.protocol import Expand, Proposal, Row
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.transformers.slots import SlotRow
from actors.engines.transformers.target import TransformersTarget
from actors.settings import DraftSettings, TargetSettings
from cluster.models import references, weights

pytestmark = pytest.mark.demo

TOLERANCE = 5e-4
"""Of logits around 20 in float32, between passes of different shapes and different layer implementations."""
TIE = 1e-3
COUNT = 32
QUESTIONS = ["Why is the sky blue?", "Name three rivers in Europe."]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = references.load_tokenizer(references.DEMO_TARGET)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in QUESTIONS
    ]
    return [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return weights.load_model(references.DEMO_TARGET, device="cpu")


@pytest.fixture(scope="module")
def reference(prompts: list[tuple[int, ...]]) -> list[tuple[list[int], torch.Tensor]]:
    """transformers' generate: the greedy answers, and the logits at each of their tokens."""
    from transformers import AutoModelForCausalLM

    hub = AutoModelForCausalLM.from_pretrained(references.fetch(references.DEMO_TARGET), dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = hub.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=COUNT,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)))
    return found


def test_the_tokenizer_knows_the_chat_format(prompts: list[tuple[int, ...]]) -> None:
    tokenizer = references.load_tokenizer(references.DEMO_TARGET)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert tokenizer.eos_token_id == end
    for prompt, question in zip(prompts, QUESTIONS, strict=True):
        assert prompt.count(start) == 3  # system, user, assistant
        assert prompt.count(end) == 2
        assert question in tokenizer.decode(prompt)
        assert tokenizer(tokenizer.decode(prompt), add_special_tokens=False).input_ids == list(prompt)


def test_ragged_slots_give_the_logits_of_generate(
    model: CausalLM, prompts: list[tuple[int, ...]], reference: list[tuple[list[int], torch.Tensor]]
) -> None:
    cache = model.cache(slots=2, context=128, scratch=4)
    rows = [
        SlotRow(i, (*p, *answer[:-1]), 0) for i, (p, (answer, _)) in enumerate(zip(prompts, reference, strict=True))
    ]
    keep, first = [], 0
    for row, prompt in zip(rows, prompts, strict=True):
        keep.extend(range(first + len(prompt) - 1, first + len(row.tokens)))
        first += len(row.tokens)
    logits = model.run(cache, rows, keep)
    torch.testing.assert_close(logits, torch.cat([scores for _, scores in reference]), rtol=0, atol=TOLERANCE)


def test_speculation_says_what_generate_says(
    model: CausalLM, prompts: list[tuple[int, ...]], reference: list[tuple[list[int], torch.Tensor]]
) -> None:
    """Both prompts side by side, the demo draft ahead by chains of four. Compared up to a near-tie, if there is one."""
    target = TransformersTarget(model, TargetSettings(slots=2, context=128))
    draft = TransformersDraft(
        weights.load_model(references.DEMO_DRAFT, device="cpu"), DraftSettings(slots=2, context=128)
    )
    assert draft.card().fingerprint == target.card().fingerprint
    outputs: list[list[int]] = [[], []]
    cached = [0, 0]
    accepted = passes = 0
    for i, prompt in enumerate(prompts):
        target.attach(i, opening(str(i), prompt, temperature=0))
        draft.open(opening(str(i), prompt, temperature=0))
    while min(map(len, outputs)) < COUNT:
        passes += 1
        paths: list[tuple[int, ...]] = [(), ()]
        for _ in range(4):
            for answer in draft.expand([Expand(str(i), paths[i]) for i in range(2)]):
                paths[int(answer.sequence)] += answer.tokens[:1]
        rows = []
        for i, prompt in enumerate(prompts):
            fresh = (*prompt, *outputs[i])[cached[i] :]
            rows.append(Row(i, (*fresh, *paths[i]), cached[i], Proposal(paths[i])))
        for i, outcome in enumerate(target.forward(rows)):
            assert outcome is not None
            accepted += outcome.accepted
            target.record(i, outcome.tokens)
            draft.advance(str(i), outcome.tokens)
            cached[i] = len(prompts[i]) + len(outputs[i]) + len(outcome.tokens) - 1
            outputs[i].extend(outcome.tokens)
    compared = 0
    for output, (answer, logits) in zip(outputs, reference, strict=True):
        best = logits.topk(2).values
        ties = ((best[:, 0] - best[:, 1]) < TIE).nonzero().flatten().tolist()
        until = min([*ties, len(answer)])
        assert output[:until] == answer[:until]
        compared += until
    assert compared > COUNT
    assert accepted > passes / 2  # two sequences: an acceptance of a fifth of one token in four would do
