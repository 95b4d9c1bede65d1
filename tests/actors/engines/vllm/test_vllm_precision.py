"""Low-precision and quantised targets, through the configuration: with drafts they say what they say without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantised import quantise
from vllm_stack import CONTEXT, SLOTS, byte_tokenizer, checkpoint, engines, prompts, settings, stack

from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.runtime import VllmModel
from actors.errors import ConfigError
from actors.text.answer_comparison import Comparison, Reference
from cluster.config.deployment import load_config
from cluster.models import factory


def configured(folder: str, **target: Any) -> VllmModel:
    """The target that a configuration describes."""
    byte_tokenizer(Path(folder))
    chosen = {
        "engine": "vllm",
        "model": folder,
        "settings": settings().model_dump(),
        "engine_kwargs": {"enforce_eager": True},
    }
    assert (chosen["settings"]["slots"], chosen["settings"]["context"]) == (SLOTS, CONTEXT)
    return factory.vllm_model(load_config({"target": chosen | target, "draft": {"kind": "none"}}))


RARE = pytest.mark.slow  # each takes the start of an engine


@pytest.mark.parametrize(
    "kind", ["bfloat16", "int8", pytest.param("int4", marks=RARE), pytest.param("fp8", marks=RARE)]
)
async def test_greedy_decoding_is_the_same_with_drafts(tmp_path: Path, kind: str) -> None:
    """Near-ties are wider in low precision; an answer may part at one, and only there."""
    if kind == "bfloat16":
        chosen = configured(checkpoint(tmp_path), dtype="bfloat16")
    else:
        chosen = configured(quantise(tmp_path, kind), dtype="auto")
    asked = prompts(24)
    async with stack(chosen) as running:
        off = await running.ask_all(asked, max_tokens=24, speculation=False, margins=True)
        on = await running.ask_all(asked, max_tokens=24)
    comparison = Comparison(chosen.tolerance)
    for i, (one, other) in enumerate(zip(off, on, strict=True)):
        comparison.add(f"prompt {i}", Reference(one.tokens, one.margins), other.tokens)
    accepted = sum(answer.origins.count("accepted") for answer in on)
    print(f"{kind}: {comparison}; {accepted} drafts accepted")
    assert comparison.same, str(comparison.different)
    assert comparison.identical > len(asked) / 2
    assert accepted > 40  # of 576 tokens


def test_what_the_platform_has_no_kernel_for_is_refused(tmp_path: Path) -> None:
    """Here: 8-bit weights alone, with activations in 16 bits, which vLLM's CPU build cannot multiply."""
    with pytest.raises(
        ConfigError, match="Failed to find a kernel that can implement the WNA16 linear layer"
    ) as refused:
        VllmEngine(configured(quantise(tmp_path, "packed int8"), dtype="auto").plan)
    assert "\n" not in str(refused.value)
    assert engines() == set()
