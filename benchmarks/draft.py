"""What the committed demo draft is worth, on prompts of no training source (benchmarks/prompts), by kind.

    python -m benchmarks draft                      # about fifteen minutes of one core
    python -m benchmarks draft --prompts 4          # a rougher look: so many prompts of each kind
    python -m benchmarks draft --folder DIR         # published prompts instead: HumanEval, Spec-Bench
    python -m benchmarks draft --templates          # prompts that share their templates with the training prompts
    python -m benchmarks draft --draft PATH         # a draft that `outrider distill` made for the demo target
    python -m benchmarks draft --compare            # every rule and temperature against early exit and prompt lookup

Greedy agreement runs along the target's greedy answers to all prompts of a kind. What it is on templates says how well
training went, not what users get. Acceptance is that of the real
engines taking turns, a chain of `--lookahead` draft tokens and then a pass: per tested token, and as tokens committed
per pass. Both are the pair's own, whatever the machine; the times below them are this machine's. Early exit (as many
of the target's first layers) and prompt lookup are drafts that need no training; with --compare the exit code is 1
unless the draft commits more tokens per pass than either, by more than chance (one-sided 5 %), in every line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from actors.engines.lookup.prompt_lookup import PromptLookupDraft
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import SlotRow
from actors.engines.transformers.target import TransformersTarget
from actors.settings import DraftSettings, Rule, TargetSettings
from actors.text.codec import TextCodec
from benchmarks.support import options
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.prompt_sets import folder_prompts, own_prompts
from benchmarks.support.provenance import heading
from cluster.distillation.appraisal import RULES
from cluster.distillation.evaluation import Acceptance, Agreement, acceptance, agreement, is_better, measure
from cluster.distillation.prompts import Ids, read_prompts
from cluster.models import references, weights
from cluster.models.demo_draft.__main__ import HELD_PROMPTS

CONTEXT = 128
"""Tokens before a timed step."""


def by_kind(
    target: CausalLM, draft: CausalLM, kinds: Mapping[str, Sequence[Ids]], tokens: int, lookahead: int
) -> list[tuple[str, Agreement, Acceptance]]:
    """Greedy agreement, and acceptance at temperature 0 drafting in turn, for each kind of prompt."""
    rows = []
    for kind, prompts in kinds.items():
        agreed = agreement(target, draft, prompts, tokens)
        length = acceptance(target, draft, prompts, rule="coupled", temperature=0.0, tokens=tokens, lookahead=lookahead)
        rows.append((kind, agreed, length))
        show_kind(kind, agreed, length)
    return rows


def show_kind(kind: str, agreed: Agreement, length: Acceptance) -> None:
    print(
        f"{kind:<16}{agreed.share:.3f} ± {agreed.error:.3f}{agreed.tokens:>8}"
        f"{length.length:>10.2f} ± {length.length_error:.2f}",
        flush=True,
    )


def pooled(rows: Sequence[tuple[str, Agreement, Acceptance]]) -> Agreement:
    """Over all kinds, each token counting once."""
    return Agreement(sum(agreed.agreed for _, agreed, _ in rows), sum(agreed.tokens for _, agreed, _ in rows))


def step_seconds(model: CausalLM, rows: int, rounds: int) -> float:
    """Median time of one pass over `rows` sequences, one token each."""
    cache = model.cache(slots=rows, context=CONTEXT + 1)
    for slot in range(rows):
        model.run(cache, [SlotRow(slot, range(100, 100 + CONTEXT), 0)], [CONTEXT - 1])
    parts = [SlotRow(slot, (7,), CONTEXT) for slot in range(rows)]
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        model.run(cache, parts, range(rows))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def lookup_acceptance(
    target: CausalLM, prompts: Sequence[Ids], *, rule: Rule, temperature: float, tokens: int, lookahead: int
) -> Acceptance:
    """Prompt lookup."""
    context = max(map(len, prompts)) + tokens + lookahead + 1
    return measure(
        TransformersTarget(target, TargetSettings(slots=len(prompts), context=context, rule=rule)),
        PromptLookupDraft(DraftSettings(slots=len(prompts), context=context, rule=rule)),
        prompts,
        rule=rule,
        temperature=temperature,
        tokens=tokens,
        lookahead=lookahead,
    )


def shown(found: Acceptance) -> str:
    return f"{found.rate:.3f} ± {found.rate_error:.3f}{found.length:>8.2f} ± {found.length_error:.2f}"


def named(rule: Rule, temperature: float) -> str:
    return f"{'every exact rule' if temperature == 0 else rule}, temperature {temperature:g}"


def compare(target: CausalLM, draft: CausalLM, early: CausalLM, prompts: Sequence[Ids], common: dict[str, int]) -> bool:
    """Print a line per rule and temperature. Returns whether the draft is the best in all of them."""
    print(f"{'':<34}{'the draft':<30}{'early exit':<30}{'prompt lookup':<30}better than both")
    best = True
    for rule, temperature in RULES:
        asked: dict[str, Any] = {"rule": rule, "temperature": temperature, **common}
        mine, others = acceptance(target, draft, prompts, **asked), [acceptance(target, early, prompts, **asked)]
        others.append(lookup_acceptance(target, prompts, **asked))
        better = all(is_better(mine, other) for other in others)
        best &= better
        columns = "".join(f"{shown(one):<30}" for one in [mine, *others])
        print(f"{named(rule, temperature):<34}{columns}{'yes' if better else 'NO'}", flush=True)
    return best


def main(argv: Sequence[str]) -> int:
    parser = options.parser("draft", __doc__)
    parser.add_argument("--draft", default=references.DEMO_DRAFT, help="a draft for the demo target")
    parser.add_argument("--prompts", type=int, default=64, help="most prompts of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="longest greedy answer, for the agreement")
    parser.add_argument("--folder", type=Path, help="published prompts in .jsonl or .jsonl.gz files")
    parser.add_argument("--templates", action="store_true", help="on prompts of the training prompts' templates")
    parser.add_argument("--goal", type=float, default=0.55, help="of the agreement over all kinds")
    parser.add_argument("--sequences", type=int, default=16, help="held-out prompts for each acceptance")
    parser.add_argument("--length", type=int, default=48, help="tokens of each, for acceptance")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of a timed step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compare", action="store_true", help="with drafts that need no training, and nothing else")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    print(heading(f"{given.draft} for {references.DEMO_TARGET}"))

    tokenizer = references.load_tokenizer(references.DEMO_TARGET)
    target, draft = weights.load_model(references.DEMO_TARGET), weights.load_model(given.draft)
    codec = TextCodec(tokenizer)
    if not given.templates and not given.compare:
        texts = folder_prompts(given.folder) if given.folder else own_prompts()
        kinds = {kind: chat_prompts(codec, prompts[: given.prompts]) for kind, prompts in texts.items()}
        print(f"\n{'kind':<16}{'agreement':<15}{'tokens':>8}   tokens per pass, {given.lookahead} drafted, in turn")
        rows = by_kind(target, draft, kinds, given.tokens, given.lookahead)
        whole = pooled(rows)
        print(f"{'all':<16}{whole.share:.3f} ± {whole.error:.3f}{whole.tokens:>8}")
        steps = print_steps(target, draft, given)
        return print_goals([Goal("greedy agreement, all kinds", whole.share, given.goal), steps])
    held = read_prompts(HELD_PROMPTS, codec, 512, chat=True)[: given.prompts]
    agreed = agreement(target, draft, held, given.tokens)
    print(
        f"\ngreedy agreement {agreed.share:.4f} ± {agreed.error:.4f} "
        f"({agreed.tokens} tokens of {len(held)} prompts of the training prompts' templates)\n"
    )

    chosen, common = held[: given.sequences], {"tokens": given.length, "lookahead": given.lookahead}
    early = weights.load_model(references.DEMO_TARGET, layers=int(draft.module.config.num_hidden_layers))
    print(f"{len(chosen)} held-out prompts, {given.length} tokens each, {given.lookahead} drafted per pass, in turn")
    print("accepted per tested token, and tokens per pass, each with its standard error")
    if given.compare:
        return 0 if compare(target, draft, early, chosen, common) else 1
    for rule, temperature in RULES:
        found = acceptance(target, draft, chosen, rule=rule, temperature=temperature, **common)
        print(f"{named(rule, temperature):<34}{shown(found)}", flush=True)
    greedy: dict[str, Any] = {"rule": "coupled", "temperature": 0.0, **common}
    print(f"{'early exit, temperature 0':<34}{shown(acceptance(target, early, chosen, **greedy))}", flush=True)
    print(f"{'prompt lookup, temperature 0':<34}{shown(lookup_acceptance(target, chosen, **greedy))}", flush=True)

    return print_goals([print_steps(target, draft, given)])


def chat_prompts(codec: TextCodec, texts: Sequence[str]) -> list[Ids]:
    """Each as the only message of a user."""
    return [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]


def print_steps(target: CausalLM, draft: CausalLM, given: argparse.Namespace) -> Goal:
    """What a step of the draft costs, beside a pass of the target; returns how the best single-row step does."""
    half = weights.load_model(given.draft, dtype="bfloat16")
    print(f"\nms, median of {given.rounds}, {CONTEXT} tokens before it; in brackets times a target pass of one token")
    base = step_seconds(target, 1, given.rounds)
    print(f"target pass, 1 token              {base * 1e3:6.1f}")
    best = 0.0
    for name, model in (("float32", draft), ("bfloat16", half)):
        for rows in (1, 8):
            seconds = step_seconds(model, rows, given.rounds)
            print(
                f"draft step, {name}, {rows} row{'s' if rows > 1 else ''}".ljust(34)
                + f"{seconds * 1e3:6.1f}  (1/{base / seconds:.1f})"
            )
            best = max(best, base / seconds if rows == 1 else 0.0)
    print()
    return Goal("draft steps of one row in the time of a target pass", best, 8.0)
