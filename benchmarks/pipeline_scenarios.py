"""The bench's scenarios: what is set up, what is measured, and which goals it is held against.

Emulated hardware takes real time but little arithmetic, so many replicas share a few cores. Where their own
bookkeeping would not fit, a scenario is slowed down as a whole (`slow_motion`): all times grow by the same factor and
ratios stay. Its setting says so.
"""

from __future__ import annotations

import os
from typing import Any

from actors.engines.emulated.presets import draft_spec, target_spec
from actors.settings import DraftSettings, LookaheadSettings, TargetSettings, TreeSettings
from benchmarks.support.actor_rig import Run
from benchmarks.support.figures import Limits, against_bound, best_in_turn_k, in_turn_speedup, summarise
from benchmarks.support.goals import Goal
from benchmarks.support.load_runner import Lab, Load, Measured
from benchmarks.support.modes import MODES, Mode, in_mode
from benchmarks.support.report import Row, Section
from cluster.config.deployment import DeploymentConfig, DraftTier, TargetTier
from cluster.planning.planner import PlanInput, expected_row


def emulated(
    target: dict[str, Any],
    draft: dict[str, Any],
    *,
    targets: int = 1,
    drafts: int = 1,
    slots: int = 16,
    tree: TreeSettings | None = None,
    lookahead: LookaheadSettings | None = None,
) -> DeploymentConfig:
    """A deployment of emulated hardware. target and draft: engine_kwargs of the two."""
    return DeploymentConfig(
        model_id="emulated",
        target=TargetTier(
            engine="emulated",
            model="emulated:reference",
            engine_kwargs=target,
            replicas=targets,
            settings=TargetSettings(slots=slots, lookahead=lookahead or LookaheadSettings(maximum=12)),
        ),
        draft=DraftTier(
            kind="emulated",
            model="emulated:reference",
            engine_kwargs=draft,
            replicas=drafts,
            settings=DraftSettings(
                slots=2 * slots, tree=tree or TreeSettings(width=32, branching=9, depth=24, nodes=2048, min_reach=1e-3)
            ),
        ),
    )


def slow_motion(replicas: int) -> float:
    """By how much to slow down so that `replicas` emulated replicas leave each other time on this machine."""
    return max(1.0, 2.0 * replicas / (os.cpu_count() or 1))


TREE_GOALS = {0.8: (3.9, 3.7), 0.6: (2.3, 2.3), 0.5: (2.0, 2.0)}
"""By acceptance, at 25/3/2 ms with verification free: speed-up at temperature 0, and above."""


async def one_sequence(
    lab: Lab, *, pass_ms: float, step_ms: float, acceptance: float, spread: float, hop_ms: float, tokens: int
) -> tuple[list[Section], Run]:
    """Goal 1: one sequence on one pair, greedy and sampled, four ways of decoding."""
    limits = Limits(pass_ms / 1e3, step_ms / 1e3, acceptance)
    k = best_in_turn_k(limits, hop_ms / 1e3)
    config = emulated({"pass_ms": pass_ms}, _draft(step_ms, acceptance, spread))
    expected = _planned(config, hop_ms, k, effort=5 * tokens)
    sections = []
    shown: Run | None = None
    for temperature in (0.0, 1.0):
        section = Section(
            f"one sequence, temperature {temperature:g}",
            {
                "pass": f"{pass_ms:g} ms",
                "draft step": f"{step_ms:g} ms",
                "acceptance": f"{acceptance:g} ± {spread:g}",
                "bound": f"{limits.tokens_per_pass:.2f}x",
                f"in turn at k={k} by formula": f"{in_turn_speedup(limits, hop_ms / 1e3, k):.2f}x",
            },
        )
        plain_speed = 0.0
        for mode in MODES:
            load = Load(1, tokens // 4 if mode == "plain" else tokens, temperature)
            measured = await lab.measure(mode, in_mode(config, mode, k), load)
            for run, found in zip(measured.runs, measured.repeats, strict=True):
                if mode != "plain":
                    found.update(against_bound(run, found, limits))
            row = Row(mode, summarise(measured.repeats))
            plain_speed = plain_speed or row.figures["tokens_per_s"].median
            row.speedup = row.figures["tokens_per_s"].median / plain_speed
            section.rows.append(row)
            shown = measured.runs[-1]
            _check(section, measured)
        tree = section.rows[-1]
        if acceptance in TREE_GOALS:
            goal = TREE_GOALS[acceptance][temperature > 0]
            section.goals.append(Goal("outcome tree over plain decoding", tree.speedup or 0.0, goal))
        _against_plan(section, expected)
        section.notes.append(_hops(tree))
        share = (tree.speedup or 0.0) / limits.tokens_per_pass
        section.notes.append(f"the tree reaches {share:.0%} of the bound")
        sections.append(section)
    assert shown is not None  # the loops above ran
    return sections, shown


async def many(lab: Lab, *, sequences: int = 64, pairs: int = 2, tokens: int = 192) -> tuple[list[Section], Run]:
    """Goal 2: many sequences on several pairs, against one sequence at the same pass and step cost."""
    slow = slow_motion(2 * pairs)
    each = sequences // pairs
    tree = TreeSettings(width=4 * each, branching=5, depth=24, nodes=256, min_reach=1e-3)
    costs = {"pass_ms": 25.0 * slow, "token_ms": 0.02 * slow, "prompt_token_ms": 0.02 * slow}
    draft = _draft(3.0 * slow, 0.8, 0.0) | {"row_ms": 0.005 * slow}
    config = emulated(costs, draft, targets=pairs, drafts=pairs, slots=each, tree=tree)
    crowd = await lab.measure("many", config, Load(sequences, tokens, vary=0.2))
    typical = summarise(crowd.repeats)
    pass_ms = costs["pass_ms"] + costs["token_ms"] * typical["steady_tokens_in_pass"].median
    rows = typical["steady_rows_per_step"].median
    step_ms = draft["step_ms"] + draft["row_ms"] * rows
    alone_tree = tree.model_copy(update={"width": max(1, round(rows / each))})
    alone_config = emulated({"pass_ms": pass_ms}, _draft(step_ms, 0.8, 0.0), tree=alone_tree)
    alone = await lab.measure("alone at that cost", alone_config, Load(1, 2 * tokens))
    section = Section(
        f"{sequences} sequences on {pairs} targets and {pairs} drafts",
        {
            "pass": f"{costs['pass_ms']:g} ms + {costs['token_ms']:g} ms a token",
            "step": f"{draft['step_ms']:g} ms + {draft['row_ms']:g} ms a node",
            "slow motion": f"{slow:g}x",
        },
        [Row(f"{sequences} sequences", typical), Row("one, at that cost", summarise(alone.repeats))],
    )
    # The crowd's answers end at different times: its steady pace is what each sequence got while all were there.
    pace = sequences * summarise(alone.repeats)["steady_tokens_per_s"].median
    section.goals.append(
        Goal("share of what single sequences predict", typical["steady_tokens_per_s"].median / pace, 0.9)
    )
    _check(section, crowd, alone)
    return [section], crowd.runs[-1]


async def overhead(
    lab: Lab, *, counts: tuple[int, ...] = (1, 8, 64, 256, 512), tokens: int = 24
) -> tuple[list[Section], Run]:
    """Goal 3: what orchestrator and links add to a pass, and how many messages a pass takes."""
    slow = slow_motion(2)
    section = Section("overhead per target pass", {"pass": f"{25 * slow:g} ms", "slow motion": f"{slow:g}x"})
    added: dict[int, float] = {}
    sent: dict[int, float] = {}
    shown: Run | None = None
    for count in counts:
        tree = TreeSettings(width=64, branching=4, depth=12, nodes=64)
        config = emulated({"pass_ms": 25.0 * slow}, _draft(3.0 * slow, 0.8, 0.0), slots=count, tree=tree)
        measured = await lab.measure(f"{count} sequences", config, Load(count, tokens), repeats=min(lab.repeats, 3))
        row = Row(f"{count} sequences", summarise(measured.repeats))
        period = row.figures["pass_s"].median + row.figures["between_passes_p50_s"].median
        added[count] = 1e3 * period - 25.0 * slow
        sent[count] = row.figures["calls_per_pass"].median + row.figures["stream_items_per_pass"].median
        section.rows.append(row)
        section.notes.append(
            f"{count} sequences: {added[count]:.2f} ms added to a pass, {sent[count]:.1f} messages a pass. {_hops(row)}"
        )
        shown = measured.runs[-1]
        _check(section, measured)
    middle = 64 if 64 in added else counts[-1]
    section.goals.append(Goal(f"ms added to a pass at {middle} sequences", added[middle], 2.0, at_least=False))
    grown = max(added.values()) - min(added.values())
    section.goals.append(Goal("ms by which that grows over all loads", grown, 2.0, at_least=False))
    ratio = sent[counts[-1]] / sent[counts[0]]
    section.goals.append(Goal("messages a pass, most over fewest sequences", ratio, 1.5, at_least=False))
    assert shown is not None  # there is at least one count
    return [section], shown


async def scaling(lab: Lab, *, replicas: tuple[int, ...] = (1, 2, 4), tokens: int = 64) -> tuple[list[Section], Run]:
    """Goal 4: throughput over target replicas, each with its draft and its share of the load."""
    slow = slow_motion(2 * max(replicas))
    section = Section("target replicas", {"pass": f"{25 * slow:g} ms", "slow motion": f"{slow:g}x"})
    shown: Run | None = None
    tree = TreeSettings(width=32, branching=4, depth=16, nodes=128)
    for count in replicas:
        config = emulated(
            {"pass_ms": 25.0 * slow}, _draft(3.0 * slow, 0.8, 0.0), targets=count, drafts=count, slots=8, tree=tree
        )
        load = Load(24 * count, tokens, concurrency=8 * count)
        measured = await lab.measure(f"{count} targets", config, load, repeats=min(lab.repeats, 3))
        row = Row(f"{count} targets", summarise(measured.repeats))
        base = section.rows[0] if section.rows else row
        row.speedup = row.figures["tokens_per_s"].median / base.figures["tokens_per_s"].median
        section.rows.append(row)
        shown = measured.runs[-1]
        _check(section, measured)
    wanted = 0.9 * replicas[-1] / replicas[0]
    section.goals.append(Goal(f"{replicas[-1]} targets over {replicas[0]}", section.rows[-1].speedup or 0.0, wanted))
    assert shown is not None  # there is at least one count
    return [section], shown


async def saturation(lab: Lab, *, sequences: int = 32, tokens: int = 64) -> tuple[list[Section], Run]:
    """Goal 5: where tokens in a pass are dear, speculation must not cost anything."""
    slow = slow_motion(2)
    costs = {"pass_ms": 10.0 * slow, "token_ms": 3.0 * slow, "prompt_token_ms": 3.0 * slow}
    tree = TreeSettings(width=32, branching=4, depth=12, nodes=64)
    config = emulated(costs, _draft(3.0 * slow, 0.6, 0.0), slots=sequences, tree=tree)
    load = Load(sequences, tokens)
    off = await lab.measure("off", in_mode(config, "plain", 1), load, repeats=min(lab.repeats, 3))
    on = await lab.measure("on", config, load, repeats=min(lab.repeats, 3))
    rows = [Row("speculation off", summarise(off.repeats)), Row("speculation on", summarise(on.repeats))]
    rows[1].speedup = rows[1].figures["tokens_per_s"].median / rows[0].figures["tokens_per_s"].median
    section = Section(
        f"saturation, {sequences} sequences",
        {"pass": f"{costs['pass_ms']:g} ms + {costs['token_ms']:g} ms a token", "acceptance": 0.6},
        rows,
        [Goal("speculation on over off", rows[1].speedup, 0.98)],
    )
    _check(section, off, on)
    return [section], on.runs[-1]


def _planned(config: DeploymentConfig, hop_ms: float, in_turn_k: int, effort: int) -> dict[Mode, float]:
    """Speed-up of every way of decoding over plain decoding, as `outrider plan` expects it."""
    draft = draft_spec(config.draft.model, config.draft.engine_kwargs)
    given = PlanInput(
        target=target_spec(config.target.model, config.target.engine_kwargs),
        draft=draft,
        hop_ms=hop_ms,
        agreements={"coupled": draft.agreement},
        tree=config.draft.settings.tree,
        effort=effort,
    )
    k = {mode: in_turn_k if mode == "in turn" else config.target.settings.lookahead.maximum for mode in MODES}
    return {mode: expected_row(given, "coupled", mode, k[mode]).speedup for mode in MODES}


def _against_plan(section: Section, expected: dict[Mode, float]) -> None:
    """How far what was measured is from what `outrider plan` said, as a share of it."""
    measured = {row.label: row.speedup or 0.0 for row in section.rows}
    errors = {mode: measured[mode] / expected[mode] - 1 for mode in MODES}
    said = ", ".join(f"{mode} {expected[mode]:.2f}x ({errors[mode]:+.1%} measured)" for mode in MODES[1:])
    section.notes.append(f"outrider plan expects: {said}")
    worst = max(abs(error) for error in errors.values())
    section.goals.append(Goal("largest error of outrider plan", worst, 0.1, at_least=False))


def _draft(step_ms: float, acceptance: float, spread: float) -> dict[str, Any]:
    return {"step_ms": step_ms, "agreement": {"acceptance": acceptance, "spread": spread}}


def _check(section: Section, *measured: Measured) -> None:
    wrong = sum(m.wrong for m in measured)
    if wrong:
        section.goals.append(Goal("wrong answers", wrong, 0, at_least=False))


def _hops(row: Row) -> str:
    found = row.figures
    offer, commit = found["offer_hop_p50_s"].median * 1e3, found["commit_hop_p50_s"].median * 1e3
    return (
        f"hops: draft to target {offer:.2f} ms (p90 {found['offer_hop_p90_s'].median * 1e3:.2f}), "
        f"target to draft {commit:.2f} ms (p90 {found['commit_hop_p90_s'].median * 1e3:.2f})"
    )
