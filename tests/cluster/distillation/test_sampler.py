"""The sampler against plain decoding, and the trainer's batches."""

from __future__ import annotations

from pathlib import Path

import torch
from small_targets import EOS, VOCABULARY, llama, prompts, settings

from actors.engines.transformers.causal_lm import CausalLM
from cluster.distillation.sampler import Sampler
from cluster.distillation.store import Sample, SampleStore
from cluster.distillation.student import build_student, choose_vocabulary
from cluster.distillation.trainer import Trainer, lay_out


def sampler(slots: int, **options: int) -> Sampler:
    model = CausalLM(llama(), name="tiny", eos=(EOS,), packed=None)
    return Sampler(model, **{"slots": slots, "context": 40, "answer": 12, "top": 5, **options})


def test_greedy_answers_are_plain_decoding_with_the_models_own_log_probabilities() -> None:
    plain = llama()
    asked = prompts(7)
    # Fewer slots than prompts, and a prefill shorter than the longest prompt: answers start at different passes.
    samples = sampler(3, prefill=4).sample([(p, 0.0) for p in asked], torch.Generator().manual_seed(1))
    for prompt, sample in zip(asked, samples, strict=True):
        assert tuple(sample.prompt.tolist()) == prompt
        text = list(prompt)
        for place, token in enumerate(sample.answer.tolist()):
            with torch.no_grad():
                logp = plain(input_ids=torch.tensor([text])).logits[0, -1].log_softmax(-1)
            best, ids = logp.topk(5)
            assert token == int(ids[0])
            assert sample.top_ids[place].tolist() == ids.tolist()
            torch.testing.assert_close(sample.top_logp[place].float(), best, atol=5e-3, rtol=1e-3)  # float16
            text.append(token)
        assert len(sample.answer) == 12 or int(sample.answer[-1]) == EOS
        assert EOS not in sample.answer[:-1].tolist()


def test_sampling_is_reproducible_and_follows_p() -> None:
    """First tokens at temperature 1 of one prompt: total variation to p below 0.08.

    With 3000 draws over 61 ids the expected distance is at most sqrt(61 / 3000) / 2 = 0.071 if p were even, and less
    for a peaked p; it deviates by more than 0.03 with probability below exp(-2 * 3000 * 0.03^2) = 0.5 % (McDiarmid).
    """
    prompt = prompts(1)[0]
    draws = [(prompt, 1.0)] * 3000
    one = sampler(500, answer=1, pool=VOCABULARY).sample(draws, torch.Generator().manual_seed(4))
    two = sampler(500, answer=1, pool=VOCABULARY).sample(draws[:500], torch.Generator().manual_seed(4))
    first = [int(s.answer[0]) for s in one]
    assert first[:500] == [int(s.answer[0]) for s in two]
    with torch.no_grad():
        p = llama()(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(first), minlength=VOCABULARY) / len(first)
    assert float((counts - p).abs().sum()) / 2 < 0.101


def test_a_shard_can_be_cut_short() -> None:
    """Answers under way keep what they have, the others are left out; nothing is cut before there is a token."""
    asked = [(p, 0.0) for p in prompts(7)]
    whole = sampler(3).sample(asked, torch.Generator())
    told: list[int] = []

    def go_on(tokens: int) -> bool:
        told.append(tokens)
        return tokens < 20

    cut = sampler(3).sample(asked, torch.Generator(), go_on)
    assert told[-1] == sum(len(sample.answer) for sample in cut) >= 20
    assert len(cut) < len(whole)
    for short, long in zip(cut, whole, strict=False):
        assert short.answer.tolist() == long.answer[: len(short.answer)].tolist()
        assert torch.equal(short.top_ids, long.top_ids[: len(short.answer)])
    one = sampler(3, prefill=2).sample(asked, torch.Generator(), lambda tokens: False)
    assert [len(sample.answer) for sample in one] == [1]


def test_an_answer_stops_at_the_end_of_the_context() -> None:
    (sample,) = sampler(1, context=10, answer=100).sample([((5, 6, 7), 1.0)], torch.Generator().manual_seed(0))
    assert len(sample) <= 10


def test_the_store_gives_back_what_it_got(tmp_path: Path) -> None:
    samples = sampler(4).sample([(p, 0.7) for p in prompts(6)], torch.Generator().manual_seed(0))
    store = SampleStore(tmp_path)
    store.append(samples[:4])
    store.append(samples[4:])
    again = list(SampleStore(tmp_path).samples())
    assert len(again) == 6
    for sample, found in zip(samples, again, strict=True):
        for name in ("prompt", "answer", "top_ids", "top_logp"):
            assert torch.equal(getattr(sample, name), getattr(found, name))
    assert SampleStore(tmp_path).tokens == sum(len(s.answer) for s in samples)


def test_lay_out_puts_each_answer_token_behind_its_prefix() -> None:
    def sample(prompt: list[int], answer: list[int]) -> Sample:
        none = torch.zeros(len(answer), 1)
        return Sample(torch.tensor(prompt).int(), torch.tensor(answer).int(), none.int(), none.half())

    ids, places = lay_out([sample([5, 6], [7, 8]), sample([9], [3, 4, 1])])
    assert ids.tolist() == [[5, 6, 7], [9, 3, 4]]
    assert places.tolist() == [[False, True, True], [True, True, True]]


def test_every_sample_has_its_turn_in_an_epoch(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    samples = sampler(8).sample([(p, 0.5) for p in prompts(30)], torch.Generator().manual_seed(0))
    for start in range(0, 30, 5):
        store.append(samples[start : start + 5])
    trainer = Trainer(build_student(llama(), (0, 3)), store, settings(batch=4, window=2))
    seen = sorted(tuple(s.prompt.tolist()) for batch in trainer._epoch_batches(0) for s in batch)
    assert seen == sorted(tuple(s.prompt.tolist()) for s in samples)
    orders = [[len(s) for batch in trainer._epoch_batches(e) for s in batch] for e in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_the_learning_rate_rises_stays_and_falls(tmp_path: Path) -> None:
    trainer = Trainer(build_student(llama(), (0,)), SampleStore(tmp_path), settings(warmup=4, decay=0.5))
    assert trainer.rate(0.0) == 0.25
    trainer.step_count = 10
    assert [trainer.rate(x) for x in (0.0, 0.5, 0.75, 1.0)] == [1.0, 1.0, 0.5, 0.0]


def test_vocabulary_by_mass() -> None:
    chosen = choose_vocabulary(torch.tensor([0.0, 5.0, 1.0, 0.0, 2.0]), 3, always=(3,))
    assert chosen is not None
    assert chosen.tolist() == [1, 3, 4]
    assert choose_vocabulary(torch.ones(3), 3) is None
    assert choose_vocabulary(torch.ones(3), None) is None


def test_a_student_of_all_layers_is_the_target() -> None:
    module = llama()
    student = build_student(module, (0, 1, 2, 3))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(student.hidden(ids) @ student.head.T, module(input_ids=ids).logits)
    assert student.trained_weights == sum(p.numel() for n, p in module.named_parameters() if "embed" not in n)
