"""Passes padded to a fixed shape say what passes of their own shape say. Without a GPU they are run, not replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_llamas import module, opening, some_tokens
from torch import Tensor

from actors.engines.protocol import Expand, Ranked
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.transformers.graphs import MOST_TOKENS, Call, Replay, Shape, compile_pass, run_again
from actors.engines.transformers.slots import SlotRow
from actors.settings import DraftSettings, TreeSettings

SETTINGS = DraftSettings(slots=4, context=96, tree=TreeSettings(nodes=16))


class Recorder:
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return run_again(work)()

        return replay


def same(one: list[Ranked], other: list[Ranked]) -> bool:
    def told(answers: list[Ranked]) -> dict[tuple[str, tuple[int, ...]], Ranked]:
        return {(ranked.sequence, ranked.path): ranked for ranked in answers}

    left, right = told(one), told(other)
    return left.keys() == right.keys() and all(
        ranked.tokens == right[key].tokens and ranked.confidences == pytest.approx(right[key].confidences, abs=1e-9)
        for key, ranked in left.items()
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_recorded_steps_ranks_as_one_without(temperature: float) -> None:
    """Trees of two sequences, commits that keep a branch and commits that keep none, a long prompt beside them."""
    record = Recorder()
    plain = TransformersDraft(CausalLM(module(), name="plain"), SETTINGS)
    graphed = TransformersDraft(CausalLM(module(), name="graphed", record=record), SETTINGS)
    names = {"a": 5, "b": 60, "c": 9}
    for draft in (plain, graphed):
        for i, (name, length) in enumerate(names.items()):
            draft.open(opening(name, some_tokens(length, i), seed=i, temperature=temperature))
    for turn in range(4):
        roots = [Expand(name, ()) for name in names]
        one, other = plain.expand(roots), graphed.expand(roots)
        assert same(one, other)
        best = {ranked.sequence: ranked.tokens for ranked in one}
        children = [Expand(name, (token,)) for name in names for token in best[name][:2]]
        one, other = plain.expand(children), graphed.expand(children)
        assert same(one, other)
        for name in names:
            committed = (best[name][turn % 3],)
            for draft in (plain, graphed):
                draft.advance(name, committed)
    assert record.recorded <= 4  # shapes, whatever the number of passes
    assert record.replayed >= 7


def test_a_compiled_step_is_traced_once_a_shape_and_in_one_piece() -> None:
    """By torch.compile's tracer, which is where a pass could fall apart; its kernels need a GPU to be worth it."""
    traced: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        traced.append(len(inputs))
        return graph.forward

    def compiling(call: Call) -> Call:
        return compile_pass(call, backend)

    plain = CausalLM(module(), name="plain")
    compiled = CausalLM(module(), name="compiled", record=run_again, compile=compiling)
    caches = [model.cache(slots=2, context=96) for model in (plain, compiled)]
    for count in (3, 4, 1, 3):  # shapes of 4 and of 1 token
        rows = [SlotRow(0, some_tokens(count, count), 0)]
        one, other = (model.run(c, rows, [count - 1]) for model, c in zip((plain, compiled), caches, strict=True))
        assert torch.allclose(one, other)
    assert len(traced) == 2


def test_long_passes_run_as_they_are() -> None:
    record = Recorder()
    model = CausalLM(module(), name="graphed", record=record)
    cache = model.cache(slots=1, context=64)
    tokens = some_tokens(MOST_TOKENS + 1, 0)
    logits = model.run(cache, [SlotRow(0, tokens, 0)], [MOST_TOKENS])
    assert record.recorded == 0
    again = CausalLM(module(), name="plain")
    expected = again.run(again.cache(slots=1, context=64), [SlotRow(0, tokens, 0)], [MOST_TOKENS])
    assert torch.allclose(logits, expected)


@pytest.mark.parametrize(
    ("tokens", "cells", "shape"),
    [(1, 1, Shape(1, 256)), (5, 257, Shape(8, 512)), (32, 900, Shape(32, 1000)), (3, 256, Shape(4, 256))],
)
def test_shapes_are_few(tokens: int, cells: int, shape: Shape) -> None:
    assert Shape.holding(tokens, cells, 1000) == shape
