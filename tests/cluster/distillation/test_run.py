"""The whole path on a tiny model: what comes out, and what an interruption leaves behind."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_targets import EOS, VOCABULARY, llama, prompts, settings, target
from transformers import AutoModelForCausalLM

from actors.errors import ConfigError, PromptError
from cluster.distillation import files
from cluster.distillation.appraisal import RULES
from cluster.distillation.job import Progress
from cluster.distillation.run import distill
from cluster.distillation.student import build_student


class Interrupted(Exception):
    """Stands for a signal."""


def stop_at(stage: str, done: float) -> Any:
    def report(progress: Progress) -> None:
        if progress.stage == stage and progress.done >= done:
            raise Interrupted

    return report


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "draft"
    distill(target(), prompts(), out, settings())
    return out


def test_a_draft_comes_out_that_agrees_more_than_its_start(tmp_path: Path) -> None:
    seen: list[Progress] = []
    size: dict[str, Any] = {"held": 24, "evaluation_tokens": 16, "max_tokens": 6000}
    card = distill(target(), prompts(300), tmp_path / "draft", settings(max_steps=150, **size), report=seen.append)
    none = distill(target(), prompts(300), tmp_path / "start", settings(max_steps=1, learning_rate=1e-12, **size))
    after, before = card["greedy_agreement"], none["greedy_agreement"]
    assert after["share"] > before["share"] + 2 * (after["error"] + before["error"])
    assert [p.stage for p in seen if p.done == 1][:4] == ["sampling", "training", "evaluation", "export"]
    training = [p for p in seen if p.stage == "training"][:150]
    assert training[-1].loss is not None
    assert training[0].loss is not None
    assert training[-1].loss < training[0].loss
    assert training[-1].seconds_left <= training[0].seconds_left


def test_the_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    module = llama()
    original = {name: weight.clone() for name, weight in module.state_dict().items()}
    card = distill(target(module), prompts(), tmp_path / "draft", settings())
    out = tmp_path / "draft"
    weights = loaded(out)
    assert sum("input_layernorm" in name for name in weights) == 2
    embedding = weights["model.embed_tokens.weight"]
    assert torch.equal(embedding, original["model.embed_tokens.weight"])  # frozen
    assert torch.equal(embedding, weights["lm_head.weight"])
    vocabulary = torch.from_numpy(_read(out / "draft_vocab.safetensors"))
    assert vocabulary.tolist() == sorted(set(vocabulary.tolist()))
    assert len(vocabulary) == 48
    assert EOS in vocabulary
    assert int(vocabulary.max()) < VOCABULARY
    assert {p.name for p in out.iterdir()} >= {"config.json", "tokenizer.json", "card.json", "README.md"}
    assert json.loads((out / "card.json").read_text()) == json.loads(json.dumps(card))
    assert {(row["rule"], row["temperature"]) for row in card["acceptance"]} == set(RULES)
    assert "48 token ids" in (out / "README.md").read_text()
    assert not (tmp_path / "draft.partial").exists()


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    module = llama(tied=False)
    head = module.lm_head.weight.clone()
    card = distill(target(module), prompts(), tmp_path / "draft", settings(vocabulary=None, max_steps=3))
    assert torch.equal(loaded(tmp_path / "draft")["lm_head.weight"], head)
    assert card["tied_head"] is False
    assert card["draft_vocabulary"] == VOCABULARY
    assert not (tmp_path / "draft" / "draft_vocab.safetensors").exists()


@pytest.mark.parametrize(
    ("stage", "done"), [("sampling", 0.1), ("training", 0.1), ("training", 0.6), ("training", 1.0), ("evaluation", 0.5)]
)
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path: Path, whole: Path, stage: str, done: float) -> None:
    cut = tmp_path / "cut"
    with pytest.raises(Interrupted):
        distill(target(), prompts(), cut, settings(), report=stop_at(stage, done))
    assert not cut.exists()
    distill(target(), prompts(), cut, settings())
    expected, found = loaded(whole), loaded(cut)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name


def test_a_resumed_run_samples_nothing_again(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        distill(target(), prompts(), tmp_path / "draft", settings(), report=stop_at("training", 0.1))
    seen: list[Progress] = []
    distill(target(), prompts(), tmp_path / "draft", settings(), report=seen.append)
    assert [p for p in seen if p.stage == "sampling"] == []
    assert len([p for p in seen if p.stage == "training"]) == 18  # of 20 steps, the first two were taken before


def test_other_settings_do_not_take_over_a_run(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        distill(target(), prompts(), tmp_path / "draft", settings(), report=stop_at("sampling", 0.1))
    with pytest.raises(ConfigError, match=r"unfinished run with other batch: give the same command"):
        distill(target(), prompts(), tmp_path / "draft", settings(batch=7))
    with pytest.raises(ConfigError, match="unfinished run with other prompts"):
        distill(target(), prompts(seed=9), tmp_path / "draft", settings())


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        distill(target(), prompts(), tmp_path / "draft", settings())
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("name", ["00001.safetensors", "training.pt", "model.safetensors", "card.json"])
def test_a_full_disk_is_said_and_costs_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __call__(self, path: Path, data: bytes) -> None:
            if path.name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            files.write_whole(path, data)

    with monkeypatch.context() as patch:
        for module in ("job", "training", "store", "export"):
            patch.setattr(f"cluster.distillation.{module}.write_whole", Full())
        with pytest.raises(ConfigError, match=r"no space is left .* give the same command again"):
            distill(target(), prompts(), tmp_path / "draft", settings())
    assert not (tmp_path / "draft").exists()
    assert not list(tmp_path.glob(".draft.part"))
    distill(target(), prompts(), tmp_path / "draft", settings())
    assert (tmp_path / "draft" / "card.json").exists()


def test_a_damaged_state_is_said(tmp_path: Path) -> None:
    (tmp_path / "draft.partial").mkdir()
    (tmp_path / "draft.partial" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"state.json is damaged: delete"):
        distill(target(), prompts(), tmp_path / "draft", settings())


def test_one_prompt_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="at least two prompts"):
        distill(target(), prompts(1), tmp_path / "draft", settings())


def test_a_target_that_cannot_be_distilled_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 layers cannot be cut out of a target of 4"):
        distill(target(), prompts(), tmp_path / "draft", settings(layers=5))
    assert not (tmp_path / "draft.partial" / "samples").exists()


def test_a_scaled_output_is_refused() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=8.0,
        initializer_range=0.5,
    )
    with pytest.raises(ConfigError, match="a scale, or a cap"):
        build_student(GraniteForCausalLM(config), (0,))


def _read(path: Path) -> Any:
    from safetensors.numpy import load_file

    return load_file(path)["draft_vocab"]
