"""The embedded draft ranks every node as a plain forward pass of its path would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from small_llamas import VOCABULARY, causal_lm, full_logits, module, opening, some_tokens

from actors.algorithms.drafting import DraftRow, rank_children
from actors.engines.protocol import Expand, Ranked
from actors.engines.transformers.draft import TransformersDraft
from actors.errors import OverloadedError, PromptError, PromptTooLongError
from actors.messages import OpenSequence, prefix_key
from actors.settings import DraftSettings, TreeSettings


def settings(**changes: object) -> DraftSettings:
    tree = TreeSettings(nodes=changes.pop("nodes", 32), branching=3)  # type: ignore[arg-type]
    return DraftSettings(**{"slots": 3, "context": 64, "tree": tree, **changes})  # type: ignore[arg-type]


def expected(request: OpenSequence, committed: Sequence[int], path: Sequence[int], **options: object) -> Ranked:
    """By one full forward pass of everything, without slots."""
    tokens = (*request.prompt, *committed, *path)
    logits = full_logits(module(), tokens)[-1:]
    row = DraftRow(request.sampling, request.seed, len(tokens), prefix_key(tokens), request.prompt, eos=())
    ranked = rank_children(logits, [row], branching=3, support=32, rule=options.pop("rule", "coupled"))[0]  # type: ignore[arg-type]
    return Ranked(request.sequence, tuple(path), ranked.tokens, ranked.confidences, ranked.support)


def same(got: Sequence[Ranked], want: Sequence[Ranked]) -> None:
    by_place = {(answer.sequence, answer.path): answer for answer in got}
    assert set(by_place) == {(answer.sequence, answer.path) for answer in want}
    for answer in want:
        found = by_place[answer.sequence, answer.path]
        assert found.tokens == answer.tokens
        assert found.confidences == pytest.approx(answer.confidences, abs=1e-6)
        assert (found.support is None) == (answer.support is None)


def test_roots_of_ragged_prompts() -> None:
    draft = TransformersDraft(causal_lm(), settings())
    requests = [opening(f"s{i}", some_tokens(n, n), i) for i, n in enumerate((4, 11, 1))]
    for request in requests:
        draft.open(request)
    same(draft.expand([Expand(r.sequence, ()) for r in requests]), [expected(r, (), ()) for r in requests])


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_nodes_of_many_sequences_in_one_step(rule: str) -> None:
    draft = TransformersDraft(causal_lm(), settings(rule=rule))
    requests = [opening("a", some_tokens(5, 1), 1), opening("b", some_tokens(9, 2), 2, temperature=0.7)]
    for request in requests:
        draft.open(request)
    answers = draft.expand([Expand(r.sequence, ()) for r in requests])
    for _ in range(3):  # every child of everything that was answered last
        paths = [
            (r, (*answer.path, token))
            for r in requests
            for answer in answers
            for token in answer.tokens[:2]
            if answer.sequence == r.sequence
        ]
        answers = draft.expand([Expand(r.sequence, path) for r, path in paths])
        same(answers, [expected(r, (), path, rule=rule) for r, path in paths])


def test_a_branch_that_came_true_is_kept_and_the_rest_dropped() -> None:
    draft = TransformersDraft(causal_lm(), settings())
    request = opening("s", some_tokens(6, 3), 3)
    draft.open(request)
    draft.expand([Expand("s", ())])
    paths = [(5,), (6,), (5, 7), (5, 8), (5, 7, 9), (5, 7, 9, 10), (6, 11)]
    for path in paths:
        draft.expand([Expand("s", path)])
    draft.advance("s", (5, 7))
    deeper = [(9, 10, 12), (9, 13), (9,), (14,)]
    same(draft.expand([Expand("s", path) for path in deeper]), [expected(request, (5, 7), path) for path in deeper])
    draft.advance("s", (9, 10))
    same(
        draft.expand([Expand("s", (12,)), Expand("s", ())]),
        [expected(request, (5, 7, 9, 10), (12,)), expected(request, (5, 7, 9, 10), ())],
    )


def test_a_correction_outside_the_tree_is_prefilled() -> None:
    draft = TransformersDraft(causal_lm(), settings())
    request = opening("s", some_tokens(6, 3), 3)
    draft.open(request)
    for path in [(), (5,), (5, 7)]:
        draft.expand([Expand("s", path)])
    draft.advance("s", (5, 20, 21))
    same(draft.expand([Expand("s", ())]), [expected(request, (5, 20, 21), ())])
    same(draft.expand([Expand("s", (7,))]), [expected(request, (5, 20, 21), (7,))])


def test_commits_before_anything_was_computed() -> None:
    draft = TransformersDraft(causal_lm(), settings())
    request = opening("s", some_tokens(6, 3), 3)
    draft.open(request)
    draft.advance("s", (8,))
    draft.advance("s", (9, 10))
    same(draft.expand([Expand("s", ())]), [expected(request, (8, 9, 10), ())])


def test_a_long_prompt_is_prefilled_in_chunks_beside_others() -> None:
    draft = TransformersDraft(causal_lm(), settings(prefill_chunk=8))
    long, short = opening("long", some_tokens(25, 4), 4), opening("short", some_tokens(3, 5), 5)
    draft.open(long)
    draft.open(short)
    asked = [Expand("long", ()), Expand("short", ())]
    same(draft.expand(asked), [expected(short, (), ())])  # 5 of 25
    first = draft.expand([Expand("short", ())])[0].tokens[0]
    steps = 0
    while True:  # 8 more a step: 13, 21, 25
        steps += 1
        answers = draft.expand([Expand("long", ()), Expand("short", (first,))])
        if len(answers) == 2:
            break
        same(answers, [expected(short, (), (first,))])
        assert steps < 10
    assert steps == 3
    same(answers, [expected(long, (), ()), expected(short, (), (first,))])


def test_an_exhausted_chunk_does_not_move_the_committed_length() -> None:
    draft = TransformersDraft(causal_lm(), settings(prefill_chunk=2))
    a, b = opening("a", some_tokens(2, 4), 4), opening("b", some_tokens(2, 5), 5)
    draft.open(b)
    draft.expand([Expand("b", ())])
    draft.expand([Expand("b", (9,))])
    draft.open(a)
    # a's two tokens use up the chunk before b's root, which is asked for again, gets its one.
    draft.expand([Expand("a", ()), Expand("b", ())])
    draft.advance("b", (9,))
    same(draft.expand([Expand("b", (7,))]), [expected(b, (9,), (7,))])


def test_a_full_scratch_drops_what_was_longest_unused_and_computes_it_again() -> None:
    draft = TransformersDraft(causal_lm(), settings(nodes=4))
    request = opening("s", some_tokens(6, 3), 3)
    draft.open(request)
    draft.expand([Expand("s", ())])
    paths = [(5,), (6,), (7,), (8,), (9,), (5, 6), (5, 6, 7), (6,), (9, 1, 2, 3)]
    for path in paths:
        same(draft.expand([Expand("s", path)]), [expected(request, (), path)])
    # Six at once do not fit into four cells: some are left out, none is wrong.
    answers = draft.expand([Expand("s", (n,)) for n in range(10, 16)])
    assert 0 < len(answers) <= 4
    same(answers, [expected(request, (), answer.path) for answer in answers])
    draft.advance("s", answers[-1].path)
    same(draft.expand([Expand("s", (3,))]), [expected(request, answers[-1].path, (3,))])


def test_random_growth_and_commits_never_corrupt_a_node() -> None:
    """Two hundred random steps over few cells; every answer is checked against a forward pass without slots."""
    generator = torch.Generator().manual_seed(1)

    def pick(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    draft = TransformersDraft(causal_lm(), settings(nodes=6, prefill_chunk=5, context=48))
    requests = {name: opening(name, some_tokens(n, n), n) for name, n in (("a", 4), ("b", 7))}
    committed: dict[str, list[int]] = {"a": [], "b": []}
    for request in requests.values():
        draft.open(request)
    answered = 0
    for _ in range(200):
        name = "ab"[pick(2)]
        if pick(4) == 0:
            fresh = [3 + pick(3) for _ in range(1 + pick(2))]
            if len(requests[name].prompt) + len(committed[name]) > 36:
                draft.open(requests[name])
                committed[name] = []
            else:
                draft.advance(name, fresh)
                committed[name] += fresh
            continue
        asked = {tuple(3 + pick(3) for _ in range(pick(4))) for _ in range(2)}
        answers = draft.expand([Expand(name, path) for path in asked])
        answered += len(answers)
        same(answers, [expected(requests[name], committed[name], answer.path) for answer in answers])
    assert answered > 100


def test_slots_are_given_back() -> None:
    draft = TransformersDraft(causal_lm(), settings(slots=2))
    for name in ("a", "b"):
        draft.open(opening(name, (1, 2)))
    with pytest.raises(OverloadedError):
        draft.open(opening("c", (1, 2)))
    draft.open(opening("a", (3, 4, 5)))  # opened again: takes the place of its former self
    draft.close("b")
    draft.close("nobody")
    request = opening("c", some_tokens(4, 9))
    draft.open(request)
    same(draft.expand([Expand("c", ())]), [expected(request, (), ())])


def test_the_end_of_the_context_is_the_end_of_drafting() -> None:
    def nothing(path: tuple[int, ...]) -> Ranked:
        return Ranked("s", path, (), ())

    draft = TransformersDraft(causal_lm(), settings(context=8))
    request = opening("s", some_tokens(7, 1))
    draft.open(request)
    same(draft.expand([Expand("s", ())]), [expected(request, (), ())])
    same(draft.expand([Expand("s", (5,)), Expand("s", (5, 6))]), [expected(request, (), (5,)), nothing((5, 6))])
    draft.advance("s", (5, 6))
    assert draft.expand([Expand("s", ())]) == [nothing(())]
    with pytest.raises(PromptTooLongError):
        draft.open(opening("t", some_tokens(9, 1)))
    with pytest.raises(PromptError):
        draft.open(opening("t", (VOCABULARY,)))


def test_a_restricted_vocabulary_proposes_only_its_own_ids() -> None:
    vocabulary = torch.tensor([3, 10, 11, 40, 41, 90])
    draft = TransformersDraft(causal_lm(vocabulary=vocabulary), settings())
    request = opening("s", some_tokens(6, 2), temperature=0)
    draft.open(request)
    answer = draft.expand([Expand("s", ())])[0]
    logits = full_logits(module(), request.prompt)[-1][vocabulary]
    assert answer.tokens == tuple(vocabulary[logits.argsort(descending=True)[:3]].tolist())
    assert answer.confidences == pytest.approx(logits.softmax(-1).sort(descending=True).values[:3].tolist(), abs=1e-6)
