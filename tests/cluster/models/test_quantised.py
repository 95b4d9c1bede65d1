"""Packed weights are as close as one byte per weight allows."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from cluster.models.demo_draft import quantised


def test_each_weight_is_within_half_a_step_of_its_row() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(7, 33) * torch.logspace(-3, 2, 7)[:, None]
    restored = quantised.restore(quantised.quantise({"w": matrix}), torch.float32)["w"]
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert bool(((restored - matrix).abs() <= step * 0.5001).all())


def test_rows_of_zeros_and_vectors_are_kept() -> None:
    weights = {
        "w": torch.zeros(2, 4),
        "norm": torch.tensor([1.5, -2.0]),
        "ids": torch.tensor([3, 9], dtype=torch.int32),
    }
    restored = quantised.restore(quantised.quantise(weights), torch.float32)
    assert {name: tensor.tolist() for name, tensor in restored.items()} == {
        "w": [[0.0] * 4] * 2,
        "norm": [1.5, -2.0],
        "ids": [3, 9],
    }


def test_the_packaged_draft_is_small_and_whole() -> None:
    assert quantised.WEIGHTS.stat().st_size < 15_000_000
    packed = load_file(quantised.WEIGHTS)
    restored = quantised.restore(packed, torch.float32)
    vocabulary = restored.pop(quantised.VOCABULARY)
    assert vocabulary.shape == (12_288,)
    assert bool((vocabulary.diff() > 0).all())
    assert 0 <= int(vocabulary[0]) <= int(vocabulary[-1]) < 49_152
    assert len(restored) == 4 * 9 + 1  # per layer four projections of attention, three of the MLP, two norms
    assert all(bool(weight.isfinite().all()) for weight in restored.values())
