"""What a hidden-state draft is worth to the demo target, by kind of prompt (benchmarks/prompts: no training source's).

    python -m benchmarks hidden-states --draft DIR      # one that `outrider distill --kind hidden_states` made
    python -m benchmarks hidden-states --draft DIR --prompts 4

Agreement runs along the target's greedy answers, at depth 1 to 4: at depth n the draft reads its own features of the
last n - 1 positions, and the target's, in bfloat16 as they travel, before that; the prefix is the target's at every
depth. `untold` is depth 1 of a draft that is told no features at all. Tokens per pass are those of the real engines
taking turns. Below: what a step costs beside the demo draft's and a pass, and what the features add to a pass and to a
message (serialised as actors exchange it).
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from actors.engines.protocol import Row
from actors.engines.transformers.feature_draft import FeatureLM
from actors.engines.transformers.features import FeatureTap
from actors.engines.transformers.slots import SlotRow
from actors.engines.transformers.target import TransformersTarget
from actors.messages import CommitUpdate, OpenSequence
from actors.settings import SamplingSettings, TargetSettings
from actors.text.codec import TextCodec
from benchmarks.draft import CONTEXT, chat_prompts, step_seconds
from benchmarks.support.prompt_sets import own_prompts
from benchmarks.support.provenance import heading
from cluster.distillation.evaluation import Agreement
from cluster.distillation.feature_appraisal import DEPTHS, agreement_by_depth, feature_acceptance
from cluster.models import references, weights


def feature_step_seconds(model: FeatureLM, rows: int, rounds: int) -> float:
    """Median time of one step over `rows` sequences, one token each (see benchmarks.draft.step_seconds)."""
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


def pass_seconds(targets: Sequence[TransformersTarget], sequences: int, rounds: int) -> list[tuple[float, bytes]]:
    """Of each target: the median time of a pass of one token for each of `sequences`, and its commits as bytes.

    The targets take turns, so that what else the machine does falls on all of them.
    """
    prompt = tuple(range(100, 100 + CONTEXT))
    for target in targets:
        for slot in range(sequences):
            target.attach(slot, OpenSequence(f"s{slot}", prompt, SamplingSettings(temperature=0), 0))
            target.forward([Row(slot, prompt, 0, decide=False)])
    rows = [Row(slot, (7,), CONTEXT) for slot in range(sequences)]
    seconds: list[list[float]] = [[] for _ in targets]
    commits: list[list[CommitUpdate]] = [[] for _ in targets]
    for _ in range(rounds + 1):
        for n, target in enumerate(targets):
            start = time.perf_counter()
            results = target.forward(rows)
            seconds[n].append(time.perf_counter() - start)
            commits[n] = [CommitUpdate(r.sequence, r.position, r.tokens, features=r.features) for r in results if r]
    mails = [pickle.dumps(mail, pickle.HIGHEST_PROTOCOL) for mail in commits]
    return [(statistics.median(times[1:]), mail) for times, mail in zip(seconds, mails, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64, help="most prompts of each kind; 0: costs alone")
    parser.add_argument("--tokens", type=int, default=64, help="longest greedy answer")
    parser.add_argument("--sequences", type=int, default=64, help="in the pass whose messages are weighed")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of what is timed")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    print(heading(f"{options.draft} for {references.DEMO_TARGET}"))

    target = weights.load_model(references.DEMO_TARGET)
    draft = weights.load_feature_draft(str(options.draft), references.DEMO_TARGET)
    if options.prompts:
        print_agreement(target, draft, options)
    print_costs(target, draft, options)
    return 0


def print_agreement(target: weights.CausalLM, draft: FeatureLM, options: argparse.Namespace) -> None:
    """By kind and depth."""
    codec = TextCodec(references.load_tokenizer(references.DEMO_TARGET))
    kinds = {kind: chat_prompts(codec, prompts[: options.prompts]) for kind, prompts in own_prompts().items()}
    print(f"\n{'kind':<16}" + "".join(f"{f'depth {n + 1}':>9}" for n in range(DEPTHS)) + "   untold  tokens  per pass")
    every: list[list[Agreement]] = []
    for kind, prompts in kinds.items():
        found = agreement_by_depth(target, draft.module, draft.vocabulary, prompts, options.tokens)
        found += agreement_by_depth(
            target, draft.module, draft.vocabulary, prompts, options.tokens, depths=1, told=False
        )
        every.append(found)
        length = feature_acceptance(
            target,
            draft,
            prompts,
            rule="coupled",
            temperature=0.0,
            tokens=options.tokens,
            lookahead=options.lookahead,
        )
        print(f"{kind:<16}{shares(found)}{found[0].tokens:>8}{length.length:>10.2f}", flush=True)
    columns = zip(*every, strict=True)
    pooled = [Agreement(sum(a.agreed for a in column), sum(a.tokens for a in column)) for column in columns]
    print(f"{'all':<16}{shares(pooled)}{pooled[0].tokens:>8}    ± {pooled[0].error:.3f}")


def shares(found: Sequence[Agreement]) -> str:
    return "".join(f"{one.share:>9.3f}" for one in found)


def print_costs(target: weights.CausalLM, draft: FeatureLM, options: argparse.Namespace) -> None:
    """Steps, passes with and without features, and messages."""
    print(f"\nms, median of {options.rounds}, {CONTEXT} tokens before it")
    demo = weights.load_model(references.DEMO_DRAFT)
    for rows in (1, 8):
        own, other = feature_step_seconds(draft, rows, options.rounds), step_seconds(demo, rows, options.rounds)
        print(f"step, {rows} rows: {own * 1e3:.1f}; the demo draft's: {other * 1e3:.1f}")
    settings = TargetSettings(slots=options.sequences, context=CONTEXT + 8)
    tap = FeatureTap(target.module, draft.module.shape.layers, draft.module.fc.weight)
    pair = (TransformersTarget(target, settings), TransformersTarget(target, settings, features=tap))
    (bare, small), (fed, large) = pass_seconds(pair, options.sequences, options.rounds)
    tap.close()
    started = time.perf_counter()
    for _ in range(options.rounds):
        pickle.loads(large)
    read = (time.perf_counter() - started) / options.rounds
    print(f"pass over {options.sequences} sequences: {bare * 1e3:.1f}, with features {fed * 1e3:.1f}")
    print(f"its commits: {len(small)} bytes, with features {len(large)}; read in {read * 1e3:.2f} ms")
