"""What is found out before anything is started: models that are not there, and drafts of another vocabulary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from two_tokenizers import TARGET

from actors.engines.protocol import ModelCard
from actors.errors import ConfigError, ModelMismatchError
from actors.orchestrator.draft_routing import mismatch
from actors.text.emulated_codec import EmulatedCodec
from cluster.config.deployment import DeploymentConfig, load_config
from cluster.distillation.feature_student import build_feature_student
from cluster.models import feature_checkpoint
from cluster.models.factory import draft_model, pin, prepare, target_model, text_facts
from deployments.cli import main
from deployments.runtime.local import free_port


def checkpoint(folder: Path, words: list[str]) -> str:
    """As much of a checkpoint as is looked at before weights are loaded."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0]).save_pretrained(folder)
    described = {"model_type": "llama", "vocab_size": len(words), "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str, str]:
    """A target, a draft that fits, and one whose vocabulary has the same words in another order."""
    words = [f"w{i}" for i in range(20)]
    permuted = [words[0], *reversed(words[1:])]
    return (
        checkpoint(tmp_path / "target", words),
        checkpoint(tmp_path / "fits", words),
        checkpoint(tmp_path / "permuted", permuted),
    )


def test_a_permuted_vocabulary_is_named_before_anything_starts(
    pair: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, fits, permuted = pair
    prepare(load_config({"target": {"model": target}, "draft": {"model": fits}}))
    raw = {"target": {"model": target}, "draft": {"model": permuted}}
    with pytest.raises(ModelMismatchError, match="vocabulary"):
        prepare(load_config(raw))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(SystemExit) as ended:
        main.main(["serve", str(path), "--port", str(free_port())])
    assert ended.value.code == 2
    assert "does not share the vocabulary" in capsys.readouterr().err


def test_a_draft_of_another_tokenizer_must_be_declared_and_only_such_a_one(pair: tuple[str, str, str]) -> None:
    target, fits, permuted = pair

    def config(model: str, **draft: object) -> DeploymentConfig:
        return load_config({"target": {"model": target}, "draft": {"model": model, **draft}})

    with pytest.raises(ModelMismatchError, match="retokenised"):
        prepare(config(permuted))
    prepare(config(permuted, kind="retokenised"))
    for same in (fits, target):
        with pytest.raises(ModelMismatchError, match=r"use draft\.kind 'model'") as refused:
            prepare(config(same, kind="retokenised"))
        assert refused.value.param == "draft.kind"
        with pytest.raises(ModelMismatchError, match=r"use draft\.kind 'model'"):
            draft_model(config(same, kind="retokenised"))
    with pytest.raises(ConfigError, match="nowhere"):
        prepare(config("./nowhere", kind="retokenised"))
    with pytest.raises(ConfigError, match="layers"):
        config(permuted, kind="retokenised", layers=2)
    with pytest.raises(ConfigError, match="cannot follow an emulated target"):
        load_config({"target": {"engine": "emulated", "model": "emulated:reference"}, "draft": {"kind": "retokenised"}})


def test_a_retokenised_draft_is_built_and_fits(pair: tuple[str, str, str], tmp_path: Path) -> None:
    """With weights: it needs no vocabulary of the target's, so its card fits any."""
    described = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(described).save_pretrained(pair[2])
    tier = {"model": pair[2], "kind": "retokenised", "settings": {"slots": 2, "context": 64}}
    config = load_config({"target": {"model": pair[0], "settings": {"context": 64}}, "draft": tier})
    card = draft_model(config).card()
    target = ModelCard(pair[0], 20, 64, 2, fingerprint="theirs")
    assert (card.vocabulary, card.slots, mismatch(target, card)) == (0, 2, None)


def test_a_draft_that_reads_hidden_states_is_built_for_its_target(tmp_path: Path) -> None:
    described = LlamaConfig(
        vocab_size=TARGET.vocabulary, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2
    )
    torch.manual_seed(0)
    whole = LlamaForCausalLM(described)
    target = str(tmp_path / "target")
    whole.save_pretrained(target)
    TARGET._tokenizer.save_pretrained(target)
    draft = tmp_path / "draft"
    draft.mkdir()
    student = build_feature_student(whole, (0, 2, 3), torch.arange(5, 15))
    feature_checkpoint.save(draft, student.module, student.vocabulary, torch.float32)

    def config(**changes: object) -> DeploymentConfig:
        size = {"slots": 2, "context": 64}
        tier = {"kind": "hidden_states", "model": str(draft), "settings": size}
        return load_config({"target": {"model": target, "settings": size}, "draft": tier, **changes})

    prepare(config())
    fed, engine = target_model(config()), draft_model(config())
    assert fed.card().features == engine.card().features != ""
    assert mismatch(fed.card(), engine.card()) is None
    plain = target_model(load_config({"target": {"model": target, "settings": {"slots": 2, "context": 64}}}))
    assert "not at all" in str(mismatch(plain.card(), engine.card()))
    wider = LlamaForCausalLM(LlamaConfig(**described.to_dict() | {"hidden_size": 16, "head_dim": 8}))
    wider.save_pretrained(target)
    with pytest.raises(ConfigError, match="this target's width is 16"):
        prepare(config())
    for rule in ("rejection", "block"):
        with pytest.raises(ConfigError, match="not been proven"):
            config(rule=rule)
    with pytest.raises(ConfigError, match="vLLM worker"):
        config(target={"engine": "vllm", "model": target, "settings": {"context": 64}})
    with pytest.raises(ConfigError, match="passes are cut up"):
        config(target={"model": target, "deterministic": True, "settings": {"context": 64}})
    with pytest.raises(ConfigError, match="tensor-parallel"):
        config(target={"model": target, "tensor_parallel_size": 2, "settings": {"context": 64}})
    with pytest.raises(ConfigError, match=r"draft\.model"):
        config(draft={"kind": "hidden_states"})


def test_deterministic_is_the_embedded_engines_promise() -> None:
    with pytest.raises(ConfigError, match="batch invariance"):
        load_config({"target": {"engine": "vllm", "deterministic": True}})
    with pytest.raises(ConfigError, match="tensor_parallel_size 1: the order in which ranks are summed"):
        load_config({"target": {"tensor_parallel_size": 2, "deterministic": True}})


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        prepare(load_config({"target": {"model": str(tmp_path / "nowhere")}}))


def test_text_facts_need_no_weights(pair: tuple[str, str, str]) -> None:
    facts = text_facts(load_config({"target": {"model": pair[0], "settings": {"context": 64}}}))
    assert (facts.vocabulary, facts.context) == (20, 64)
    facts = text_facts(load_config({"target": {"model": pair[0]}, "draft": {"kind": "none"}}))
    assert facts.context == 128  # the model's own positions
    emulated = {"engine": "emulated", "model": "emulated:reference"}
    facts = text_facts(load_config({"target": emulated, "draft": {"kind": "none"}}))
    assert isinstance(facts.codec, EmulatedCodec)


def test_lookup_settings_are_checked() -> None:
    card = draft_model(load_config({"draft": {"kind": "prompt_lookup", "engine_kwargs": {"longest": 3}}})).card()
    assert card.vocabulary == 0
    with pytest.raises(ConfigError, match="engine_kwargs"):
        draft_model(load_config({"draft": {"kind": "prompt_lookup", "engine_kwargs": {"size": 3}}}))


def test_a_missing_suffix_library_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    config = load_config({"draft": {"kind": "suffix", "memory": {"tokens": 1000}}})
    for build in (prepare, draft_model):
        with pytest.raises(ConfigError, match=r"pip install 'outrider\[suffix\]'$"):
            build(config)


def test_a_memory_is_for_suffix_drafts() -> None:
    with pytest.raises(ConfigError, match=r"draft\.memory is for drafts of kind 'suffix', not 'model'"):
        load_config({"draft": {"memory": {}}})


def test_pinning_keeps_to_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """Run in a thread, because it is the calling thread that is pinned."""
    import os
    import threading

    from cluster.config.deployment import Resources

    seen: list[set[int]] = []

    def look(cores: tuple[int, ...]) -> None:
        pin(Resources(cores=cores))
        seen.append(os.sched_getaffinity(0))

    before = os.sched_getaffinity(0)
    first = min(before)
    for cores in ((first, 4000), (4000,)):
        thread = threading.Thread(target=look, args=(cores,))
        thread.start()
        thread.join()
    assert seen == [{first}, before]
    assert "not pinned" in caplog.text
    assert os.sched_getaffinity(0) == before


def test_a_thread_may_step_back_for_others() -> None:
    import os
    import threading

    from cluster.config.deployment import Resources

    seen: list[int] = []

    def look() -> None:
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        pin(Resources(nice=5))
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - before)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [max(5 - os.getpriority(os.PRIO_PROCESS, 0), 0)]  # nobody is set forward


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_was_said_is_no_draft_for_rules_that_draw_with_the_same_noise(rule: str) -> None:
    with pytest.raises(ConfigError, match=r"draft\.kind 'suffix' goes with rule 'coupled' or 'typical'"):
        load_config({"rule": rule, "draft": {"kind": "suffix"}})
