"""Packing a draft into the demo draft's committed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_targets import llama

from actors.errors import ConfigError
from cluster.distillation.student import vocabulary_bytes, vocabulary_file
from cluster.models.demo_draft import pack, quantised

FACTS = {
    "layers_from": None,
    "sampled_tokens": 10,
    "steps": 3,
    "trained_positions": 30,
    "sampling_seconds": 1.0,
    "training_seconds": 2.0,
    "greedy_agreement": {"share": 0.5, "error": 0.1, "tokens": 25},
    "settings": {},
    "draft_vocabulary": 3,
}


def a_draft(folder: Path, *, layers: int = 4, target: str = "demo:smollm2-135m", **facts: Any) -> Path:
    llama(layers=layers).save_pretrained(folder)
    vocabulary_file(folder).write_bytes(vocabulary_bytes(torch.tensor([2, 5, 9])))
    (folder / "card.json").write_text(json.dumps({**FACTS, "start": "demo:draft", "target": target, **facts}))
    return folder


def test_what_is_packed_is_the_draft_to_a_step_of_int8(tmp_path: Path) -> None:
    out = tmp_path / "packed"
    out.mkdir()
    (out / "info.json").write_text(json.dumps({"training": [{"steps": 309}]}))
    size = pack.pack(a_draft(tmp_path / "draft"), out)
    assert size == (out / "draft.safetensors").stat().st_size
    found = quantised.restore(load_file(out / "draft.safetensors"), torch.float32)
    assert found.pop("draft_vocab").tolist() == [2, 5, 9]
    original = llama().state_dict()
    assert set(original) - set(found) == {"model.embed_tokens.weight", "lm_head.weight"}
    for name, weight in found.items():
        step = original[name].abs().amax(-1, keepdim=True) / 127 if weight.ndim == 2 else torch.zeros(1)
        assert bool(((weight - original[name]).abs() <= step * 0.5001).all()), name
    info = json.loads((out / "info.json").read_text())
    assert [one["steps"] for one in info["training"]] == [309, 3]  # it began from the demo draft
    assert info["vocabulary"] == 3


def test_a_draft_from_scratch_has_no_rounds_before_it(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text(json.dumps({"training": [{"steps": 309}]}))
    pack.pack(a_draft(tmp_path / "draft", start=None, layers_from=[0, 1, 2, 29]), tmp_path)
    assert [one["steps"] for one in json.loads((tmp_path / "info.json").read_text())["training"]] == [3]


def test_what_is_no_demo_draft_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has no card.json"):
        pack.pack(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="is a draft for mine, not for demo:smollm2-135m"):
        pack.pack(a_draft(tmp_path / "a", target="mine"), tmp_path)
    with pytest.raises(ConfigError, match="the demo draft has 4 layers"):
        pack.pack(a_draft(tmp_path / "b", layers=3), tmp_path)
    monkeypatch.setattr(pack, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="at most 1,000 are committed"):
        pack.pack(a_draft(tmp_path / "c"), tmp_path)
    assert not (tmp_path / "draft.safetensors").exists()
