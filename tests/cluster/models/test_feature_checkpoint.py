"""EAGLE-3 checkpoints as SafeAILab and speculators write them, in small, and what is wrong with a damaged one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_llamas import VOCABULARY, module
from torch import Tensor

from actors.engines.transformers.feature_draft import FeatureLM
from actors.errors import ConfigError
from cluster.distillation.feature_student import build_feature_student
from cluster.models import feature_checkpoint as checkpoint

WIDTH, ROWS = 32, 40
SIZES = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
EAGLE: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": ROWS}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0",
    "draft_vocab_size": ROWS,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "transformer_layer_config": SIZES,
}
IDS = torch.arange(ROWS) * 2 + 3


def target() -> Any:
    return module(layers=6, dtype=torch.float32)


def tensors(prefix: str = "midlayer.") -> dict[str, Tensor]:
    """As they are found in such checkpoints, with random numbers."""
    torch.manual_seed(0)
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (ROWS, WIDTH),
        f"{prefix}self_attn.q_proj.weight": (32, 2 * WIDTH),
        f"{prefix}self_attn.k_proj.weight": (16, 2 * WIDTH),
        f"{prefix}self_attn.v_proj.weight": (16, 2 * WIDTH),
        f"{prefix}self_attn.o_proj.weight": (WIDTH, 32),
        f"{prefix}mlp.gate_proj.weight": (64, WIDTH),
        f"{prefix}mlp.up_proj.weight": (64, WIDTH),
        f"{prefix}mlp.down_proj.weight": (WIDTH, 64),
        f"{prefix}input_layernorm.weight": (WIDTH,),
        f"{prefix}hidden_norm.weight": (WIDTH,),
        f"{prefix}post_attention_layernorm.weight": (WIDTH,),
    }
    marks = torch.zeros(VOCABULARY, dtype=torch.bool)
    marks[IDS] = True
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {
        "d2t": IDS - torch.arange(ROWS),
        "t2d": marks,
    }


def written(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(folder: Path) -> tuple[Any, Tensor | None]:
    model = target()
    text = model.config.get_text_config()
    return checkpoint.load(folder, text, model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach())


def test_the_layout_of_safeailab(tmp_path: Path) -> None:
    written(tmp_path, EAGLE, tensors())
    found, vocabulary = load(tmp_path)
    assert found.shape.layers == (2, 3, 3)  # 2, half of six, six less three: what vLLM takes where nothing is said
    assert not found.shape.norm_before_residual
    assert vocabulary is not None
    assert vocabulary.tolist() == IDS.tolist()
    torch.testing.assert_close(found.midlayer.self_attn.k_proj.weight, tensors()["midlayer.self_attn.k_proj.weight"])
    torch.testing.assert_close(found.head, tensors()["lm_head.weight"])
    torch.testing.assert_close(found.embedding, target().get_input_embeddings().weight.detach())
    # Frequency n of the rotary embedding is theta^(-2n/d), d = 8.
    torch.testing.assert_close(found.rotary.inv_freq, 5000.0 ** (-torch.arange(4) / 4))


def test_a_pickled_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    found, _ = load(tmp_path)
    torch.testing.assert_close(found.fc.weight, tensors()["fc.weight"])


def test_the_layout_of_speculators(tmp_path: Path) -> None:
    weights = tensors("layers.0.")
    weights["embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH)
    written(tmp_path, SPECULATORS, weights)
    found, vocabulary = load(tmp_path)
    assert found.shape.layers == (1, 2, 4)
    assert found.shape.norm_before_residual
    assert vocabulary is not None
    assert vocabulary.tolist() == IDS.tolist()
    torch.testing.assert_close(found.midlayer.hidden_norm.weight, weights["layers.0.hidden_norm.weight"])
    torch.testing.assert_close(found.embedding, weights["embed_tokens.weight"])
    layers, projection = checkpoint.load_projection(tmp_path, target().config)
    assert layers == (1, 2, 4)
    torch.testing.assert_close(projection, weights["fc.weight"])
    assert checkpoint.is_feature_draft(tmp_path)


def test_a_whole_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    weights = {name: w for name, w in tensors().items() if name not in ("d2t", "t2d", "lm_head.weight")}
    written(tmp_path, EAGLE, weights)
    found, vocabulary = load(tmp_path)
    assert vocabulary is None
    torch.testing.assert_close(found.head, target().lm_head.weight.detach())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    student = build_feature_student(target(), (0, 3, 5), IDS, seed=3)
    checkpoint.save(tmp_path, student.module, IDS, torch.float32)
    found, vocabulary = load(tmp_path)
    assert found.shape.layers == (0, 3, 5)
    assert vocabulary is not None
    assert vocabulary.tolist() == IDS.tolist()
    kept = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in kept
    assert "embed_tokens.weight" not in kept
    for name, parameter in student.module.named_parameters():
        torch.testing.assert_close(dict(found.named_parameters())[name], parameter, msg=name)
    draft = FeatureLM(found, name="draft", vocabulary=vocabulary)
    assert draft.features == FeatureLM(student.module, name="draft").features


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        del weights[name]

    return change


def _with(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("fc.weight"), "has no tensor fc.weight"),
        (_without("midlayer.hidden_norm.weight"), "has no tensor midlayer.hidden_norm.weight"),
        (_without("d2t"), "has a t2d and no d2t"),
        (_with("d2t", torch.full((ROWS,), VOCABULARY)), "d2t leads to id 136, but the target has 97 ids"),
        (_with("d2t", torch.zeros(ROWS)), "d2t must be a row of whole numbers"),
        (_with("d2t", -torch.arange(ROWS)), "d2t does not lead to rising ids"),
        (_with("t2d", torch.ones(VOCABULARY, dtype=torch.bool)), "t2d marks other ids than d2t leads to"),
        (_with("t2d", torch.ones(3, dtype=torch.bool)), r"t2d has shape \[3\]"),
        (_with("lm_head.weight", torch.zeros(9, WIDTH)), r"lm_head.weight has shape \[9, 32\], not \[40, 32\]"),
        (_with("fc.weight", torch.zeros(WIDTH, WIDTH)), r"fc.weight has shape \[32, 32\], not \[32, 96\]"),
        (_with("norm.weight", torch.full((WIDTH,), torch.nan)), "norm.weight holds numbers that are not finite"),
    ],
)
def test_a_damaged_tensor_is_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    weights = tensors()
    change(weights)
    written(tmp_path, EAGLE, weights)
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"hidden_size": 64}, "this target's width is 32"),
        ({"target_hidden_size": 128}, "for a target of width 128"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "names layer 9"),
        ({"norm_output": True}, "asks for norm_output"),
    ],
)
def test_a_configuration_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    written(tmp_path, EAGLE | changes, tensors())
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_an_empty_folder_and_a_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    with pytest.raises(ConfigError, match="neither"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="is damaged"):
        load(tmp_path)
