"""`kind: hidden_states` on a tiny model: what is trained on, what comes out, and that it goes on after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from small_targets import EOS, VOCABULARY, llama, prompts, settings, target
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.errors import ConfigError
from cluster.distillation.feature_appraisal import RULES, agreement_by_depth
from cluster.distillation.feature_student import (
    HiddenStates,
    UnrolledAttention,
    build_feature_student,
    delayed,
    unrolled,
)
from cluster.distillation.job import Progress
from cluster.distillation.run import distill
from cluster.models import feature_checkpoint


def feature_settings(**changes: Any) -> Any:
    return settings(**{"kind": "hidden_states", "layers": 1, **changes})


class Interrupted(Exception):
    """Stands for a signal."""


def test_a_draft_comes_out_that_agrees_more_than_its_start(tmp_path: Path) -> None:
    size: dict[str, Any] = {"held": 24, "evaluation_tokens": 16, "max_tokens": 6000, "feature_layers": (0, 1)}
    card = distill(target(), prompts(300), tmp_path / "draft", feature_settings(max_steps=150, **size))
    still = feature_settings(max_steps=1, learning_rate=1e-12, **size)
    none = distill(target(), prompts(300), tmp_path / "start", still)
    after, before = card["greedy_agreement"], none["greedy_agreement"]
    assert after["share"] > before["share"] + 2 * (after["error"] + before["error"])
    by_depth = card["greedy_agreement_by_depth"]
    assert len(by_depth) == 4
    assert by_depth[0] == after["share"]
    assert min(by_depth[1:]) > max(none["greedy_agreement_by_depth"])
    assert {(row["rule"], row["temperature"]) for row in card["acceptance"]} == set(RULES)


def test_the_checkpoint_is_of_eagle_3s_layout(tmp_path: Path) -> None:
    module = llama()
    text, head = module.config, module.lm_head.weight.detach().clone()
    card = distill(target(module), prompts(), tmp_path / "draft", feature_settings(feature_layers=(0, 2, 3)))
    out = tmp_path / "draft"
    assert {p.name for p in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "card.json"}
    assert json.loads((out / "card.json").read_text()) == json.loads(json.dumps(card))
    assert card["kind"] == "hidden_states"
    assert card["feature_layers"] == [0, 2, 3]
    found, vocabulary = feature_checkpoint.load(out, text, head, head)
    assert found.shape.layers == (0, 2, 3)
    assert vocabulary is not None
    assert len(vocabulary) == 48
    assert EOS in vocabulary
    assert int(vocabulary.max()) < VOCABULARY
    torch.testing.assert_close(found.head, head[vocabulary])


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "training" and progress.done >= 0.5:
            raise Interrupted

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    same = feature_settings(kept_gib=0)  # states that are kept were computed in another batch
    distill(target(), prompts(), whole, same)
    with pytest.raises(Interrupted):
        distill(target(), prompts(), cut, same, report=stop)
    distill(target(), prompts(), cut, same)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, cut))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, msg=name)


def test_hidden_states_are_those_that_transformers_reports() -> None:
    module, ids = llama(), torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    with HiddenStates(module, (0, 2, 3)) as reader:
        found = reader.read(ids)
    with torch.no_grad():
        expected = module(input_ids=ids, output_hidden_states=True).hidden_states
    for states, number in zip(found, (0, 2, 3), strict=True):
        torch.testing.assert_close(states, expected[number])
    assert not any(layer._forward_pre_hooks for layer in module.model.layers)


def test_training_reads_what_a_draft_that_runs_ahead_reads() -> None:
    """Each depth against a draft that goes token by token, keeping all keys and values in plain lists."""
    student = build_feature_student(llama(), (0, 2, 3))
    draft = student.module.double()
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (1, 9))
    told = torch.randn(1, 9, 32, dtype=torch.float64)
    with torch.no_grad():
        passes = list(unrolled(draft, ids, told, 4))
        for end in range(4, 9):
            for depth in range(4):
                # Tokens up to `end` - depth read true features, the `depth` last ones their own.
                known = end - depth
                expected = _token_by_token(draft, ids[0, : end + 1], told[0, :known])
                torch.testing.assert_close(passes[depth][0, end], expected)


def _token_by_token(draft: Any, ids: Tensor, told: Tensor) -> Tensor:
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key.repeat_interleave(2, 1))
        values.append(value.repeat_interleave(2, 1))
        weights = (query @ torch.cat(keys, 2).transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        return (weights @ torch.cat(values, 2)).transpose(1, 2)

    own = torch.zeros(1, 1, 32, dtype=torch.float64)
    for position, token in enumerate(ids):
        if position:
            own = told[None, position - 1 : position] if position <= len(told) else own
        own = draft(token.view(1, 1), torch.tensor([[position]]), own, attend)
    hidden: Tensor = draft.norm(own)[0, 0]
    return hidden


def test_features_are_of_the_position_before() -> None:
    moved = delayed(torch.tensor([[[1.0], [2.0], [3.0]]]))
    assert moved.tolist() == [[[0.0], [1.0], [2.0]]]


def test_the_first_position_of_a_later_pass_sees_itself() -> None:
    attention = UnrolledAttention()
    torch.manual_seed(0)
    passes = [[torch.randn(1, 2, 3, 4) for _ in range(3)] for _ in range(3)]
    mixed = [attention(*one) for one in passes]
    torch.testing.assert_close(mixed[2][0, 0], passes[2][2][0, :, 0])


def test_a_student_that_says_what_the_target_says_agrees_throughout() -> None:
    """The counting: a draft whose head has the target's answer as its only row agrees everywhere, another nowhere."""
    module = llama()
    lm = CausalLM(module, name="tiny", eos=(EOS,))
    answer = int(torch.bincount(torch.tensor([p[0] for p in prompts()])).argmax())
    student = build_feature_student(llama(), (0, 2, 3), torch.tensor([answer]))
    found = agreement_by_depth(lm, student.module, student.vocabulary, prompts()[:6], 8, depths=2)
    from cluster.distillation.evaluation import greedy_answers

    said = [token for one in greedy_answers(lm, prompts()[:6], 8) for token in one]
    assert [one.tokens for one in found] == [len(said)] * 2
    assert [one.agreed for one in found] == [said.count(answer)] * 2


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ValidationError, match="has one layer"):
        feature_settings(layers=2)
    with pytest.raises(ConfigError, match="no hidden state enters a layer 9"), HiddenStates(llama(), (0, 9)):
        pass
