"""Configurations with `engine: vllm`, as far as they go without vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.errors import ConfigError
from cluster.config.deployment import DeploymentConfig, load_config
from cluster.models.factory import check_ranks, draft_model
from cluster.models.references import checkpoint_end_ids
from cluster.models.weights import load_model
from cluster.scaling.placement import actor_gpus, bundles


def config(**target: object) -> DeploymentConfig:
    return load_config({"target": {"engine": "vllm", **target}, "draft": {"kind": "none"}})


def test_the_gpus_of_a_group_belong_to_its_actor_or_to_rays_workers() -> None:
    shape = {"tensor_parallel_size": 4, "resources": {"num_cpus": 2, "num_gpus": 1}}
    one_process_tree = config(**shape)
    assert actor_gpus(one_process_tree, "target") == 4
    assert bundles(one_process_tree, "target") == [{"CPU": 2, "GPU": 4}]
    spread = config(**shape, engine_kwargs={"distributed_executor_backend": "ray"})
    assert actor_gpus(spread, "target") == 0  # it is in the first bundle beside a rank that has the GPU
    assert bundles(spread, "target") == [{"CPU": 2, "GPU": 1}] * 4


def test_the_type_of_the_checkpoint_goes_through_to_vllm_only() -> None:
    assert config(dtype="auto", engine_kwargs={"quantization": "fp8"}).target.dtype == "auto"
    for tier in ("target", "draft"):
        with pytest.raises(ConfigError, match=f"{tier}.dtype 'auto' goes with"):
            load_config({tier: {"dtype": "auto"}})


def test_a_draft_on_vllm_is_a_model_of_its_own() -> None:
    assert load_config({"draft": {"engine": "vllm", "model": "some/draft", "dtype": "auto"}}).draft.engine == "vllm"
    with pytest.raises(ConfigError, match="runs drafts of kind 'model', not 'prompt_lookup'"):
        load_config({"draft": {"engine": "vllm", "kind": "prompt_lookup"}})
    with pytest.raises(ConfigError, match="has a head of its own"):
        draft_model(load_config({"draft": {"engine": "vllm"}}))


@pytest.mark.parametrize("draft", [{"kind": "prompt_lookup"}, {"engine": "vllm", "model": "some/draft"}])
def test_only_a_draft_on_transformers_is_compiled(draft: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"draft\.compile is for drafts of kind"):
        load_config({"draft": {"compile": True, **draft}})


def test_without_a_gpu_nothing_is_compiled() -> None:
    with pytest.raises(ConfigError, match="for drafts on a GPU: compiled steps were slower on a CPU"):
        load_model("demo:draft", device="cpu", compiled=True)


def test_ranks_must_divide_the_heads(tmp_path: Path) -> None:
    described = {
        "model_type": "llama",
        "hidden_size": 288,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_ranks(config(model=str(tmp_path), tensor_parallel_size=3))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 does not divide the 9 .* use one of 1, 3, 9"):
        check_ranks(config(model=str(tmp_path), tensor_parallel_size=2))
    transformers = {"model": str(tmp_path), "tensor_parallel_size": 9}
    check_ranks(config(**transformers))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 9 does not divide the 3 key heads .* use one of 1, 3"):
        check_ranks(load_config({"target": transformers}))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config.json": 7}, (7,)),
        ({"config.json": 7, "generation_config.json": [7, 9]}, (7, 9)),
        ({"config.json": None}, ()),
    ],
)
def test_ends_of_text_are_the_checkpoints(tmp_path: Path, files: dict[str, object], ids: tuple[int, ...]) -> None:
    for name, found in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": found}))
    assert checkpoint_end_ids(tmp_path) == ids
