"""`outrider plan --traffic`: what a day takes and how well it goes, with the sizes of both tiers over time."""

from __future__ import annotations

import json
from typing import Any

import typer

from actors.errors import ConfigError
from cluster.planning.replay import TrafficResult, replay
from cluster.planning.traffic import PRESETS, TrafficInput

LINES = 12


def show(name: str, changes: dict[str, Any], as_json: bool) -> None:
    """Replay preset `name` with `changes` and print what came of it. Raises ConfigError."""
    given = _given(name, changes)
    result = replay(given)
    if as_json:
        typer.echo(json.dumps(figures(given, result)))
        return
    told = figures(given, result)
    typer.echo(f"{name}: {given.seconds / 3600:.1f} h, {told['requests']:.0f} requests, {told['tokens']:.4g} tokens")
    typer.echo(f"replica-hours      targets {told['target_hours']:.1f}, drafts {told['draft_hours']:.1f}")
    typer.echo(f"most at once       targets {told['target_peak']}, drafts {told['draft_peak']}")
    typer.echo(f"within {given.most_wait_s:g} s         {told['attainment']:.2%} of requests began to run")
    typer.echo(f"turned away        {told['turned_away']:.0f} after {given.patience_s:g} s")
    typer.echo(f"over plain         {told['speedup']:.2f}x tokens of each running sequence")
    typer.echo(f"changes of size    {told['decisions']}; replicas lost {told['lost_replicas']}")
    typer.echo("\n  time  requests/s  targets  drafts")
    step = max(1, len(result.sizes) // LINES)
    most = max(targets for _, targets, _ in result.sizes)
    for at, targets, drafts in result.sizes[::step]:
        bar = "#" * round(30 * targets / max(1, most))
        typer.echo(f"{at / 3600:5.1f}h  {given.rate(at):10.1f}  {targets:7d}  {drafts:6d}  {bar}")


def figures(given: TrafficInput, result: TrafficResult) -> dict[str, float]:
    """What `--json` prints."""
    names = [name for name in TrafficResult.__slots__ if name != "sizes"]
    return {name: getattr(result, name) for name in names} | {"attainment": result.attainment, "seconds": given.seconds}


def _given(name: str, changes: dict[str, Any]) -> TrafficInput:
    from pydantic import ValidationError

    from actors.settings import problems

    if name not in PRESETS:
        raise ConfigError(f"--traffic {name}: it is one of {', '.join(PRESETS)}", "traffic")
    try:
        return TrafficInput.model_validate(PRESETS[name].model_dump() | changes)
    except ValidationError as error:
        found = problems(error, PRESETS[name].model_dump(), "traffic")
        raise ConfigError("plan --traffic: " + "; ".join(found)) from error
