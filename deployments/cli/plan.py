"""`outrider plan`: does speculation pay?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.errors import ConfigError
from deployments.cli.options import AsJson

EXAMPLES = (
    "Examples:\n\n"
    "outrider plan --target h100-70b --draft l4-1b --acceptance 0.7\n\n"
    "outrider plan --pass-ms 25 --step-ms 3 --acceptance 0.8 --sequences 16    times that you measured\n\n"
    "outrider plan --traffic day                                               a day through the autoscaling policies"
)
"""The end of the command's help."""


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(help="YAML with any field of cluster.planning.planner.PlanInput.", show_default=False),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Hardware and model of the target, for example emulated:h100-70b.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The same for the draft, for example emulated:l4-1b.")] = None,
    pass_ms: Annotated[float | None, typer.Option(min=0, help="Or: time of a target pass.")] = None,
    step_ms: Annotated[float | None, typer.Option(min=0, help="Or: time of a draft step.")] = None,
    acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of draft tokens accepted (`outrider acceptance`).")
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Running at once on each target.")] = None,
    target_gpu_hour: Annotated[float | None, typer.Option(min=0, help="Price of a target GPU for an hour.")] = None,
    draft_gpu_hour: Annotated[float | None, typer.Option(min=0, help="Price of a draft GPU for an hour.")] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            help="Instead: a day of traffic through the autoscaling policies. constant, day, burst, spot or internet; "
            "FILE then has fields of cluster.planning.traffic.TrafficInput.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Work out whether speculation pays, with how much lookahead, and how many drafts a target wants."""
    from cluster.planning.planner import assumptions
    from cluster.planning.planner import plan as work_out

    given = _given(file)
    if traffic is not None:
        from deployments.cli.traffic_report import show

        show(traffic, given, as_json)
        return
    for name, preset, times in (
        ("target", target, {"pass_ms": pass_ms}),
        ("draft", draft, {"step_ms": step_ms}),
    ):
        given[name] = {**given.get(name, {}), **_preset(name, preset)}
        given[name] |= {key: value for key, value in times.items() if value is not None}
    if acceptance is not None:
        spread = min(0.15, acceptance, 1 - acceptance)
        given["agreements"] = {"coupled": {"acceptance": acceptance, "spread": spread}}
    more = {"sequences": sequences, "target_gpu_hour": target_gpu_hour, "draft_gpu_hour": draft_gpu_hour}
    given |= {key: value for key, value in more.items() if value is not None}
    asked = _validated(given)
    found = work_out(asked)
    if as_json:
        told = {"pays": found.pays, "best": asdict(found.best), "break_even": found.break_even}
        typer.echo(json.dumps({**told, "rows": [asdict(row) for row in found.rows]}))
        return
    typer.echo("Assumed (--pass-ms, --step-ms, --acceptance, --sequences, prices, or a FILE say otherwise):")
    for line in assumptions(asked):
        typer.echo(f"  {line}")
    typer.echo("")
    rows = found.table()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    typer.echo(
        "\nin turn: drafts and target wait for each other; chain, tree: drafts run ahead. busy: share of the time."
    )
    best = found.best
    with_drafts = f", {best.drafts} to {best.targets} (drafts to targets)" if best.drafts else ""
    typer.echo(f"\nBest: {best.method}, {best.speedup:.2f}x{with_drafts}")
    for rule, limit in found.break_even.items():
        pays = "at any load" if limit is None else f"below about {limit:.0f} sequences in a pass"
        typer.echo(f"Rule {rule}: a draft token is worth verifying {pays}.")


def _given(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    import yaml

    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {file}: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{file} holds no mapping")
    return given


def _preset(name: str, reference: str | None) -> dict[str, Any]:
    if reference is None:
        return {}
    from actors.engines.emulated.presets import draft_spec, target_spec

    reference = reference if reference.startswith("emulated:") else f"emulated:{reference}"
    spec = target_spec(reference) if name == "target" else draft_spec(reference)
    return spec.model_dump(exclude_defaults=True)


def _validated(given: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from actors.settings import problems
    from cluster.planning.planner import PlanInput

    try:
        return PlanInput.model_validate(given)
    except ValidationError as error:
        raise ConfigError("plan: " + "; ".join(problems(error, PlanInput().model_dump(), "plan"))) from error
