"""Tensor-parallel ranks of vLLM on two nodes, by its Ray executor: the mailbox is reached over TCP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_nodes
from vllm_stack import checkpoint, module, prompts

from actors.text.answer_comparison import Comparison, Reference

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


@pytest.mark.slow  # a Ray cluster of two nodes, and three processes that import vLLM
def test_ranks_on_two_nodes_say_what_one_process_says(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    two_nodes.platform_plugin(plugin)
    folder = checkpoint(tmp_path / "tiny")
    path = os.pathsep.join(map(str, (ROOT, HERE, plugin)))
    ran = subprocess.run(
        [sys.executable, str(HERE / "two_nodes.py"), folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["nodes"] == 2
    assert found["accepted"] > 40  # of 320 tokens
    comparison = Comparison()
    for i, (prompt, tokens) in enumerate(zip(prompts(two_nodes.PROMPTS), found["tokens"], strict=True)):
        comparison.add(f"prompt {i}", reference(prompt, len(tokens)), tokens)
    print(f"two nodes against one process: {comparison}")
    assert comparison.same, str(comparison.different)
    assert comparison.ties <= 1


@torch.inference_mode()
def reference(prompt: tuple[int, ...], count: int) -> Reference:
    """Greedy tokens by transformers, and the distance between the two best scores at each."""
    embedded, tokens, margins = module(), list(prompt), []
    for _ in range(count):
        best = embedded(input_ids=torch.tensor([tokens])).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return Reference(tokens[len(prompt) :], margins)
