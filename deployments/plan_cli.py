"""`outrider plan` and `outrider acceptance`: does speculation pay, and what does a running draft achieve?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.errors import ConfigError

if TYPE_CHECKING:
    from deployments.results import Result

AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


def plan(
    file: Annotated[
        Path | None, typer.Argument(help="YAML with any field of cluster.planner.PlanInput.", show_default=False)
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
            "FILE then has fields of cluster.traffic.TrafficInput.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Work out whether speculation pays, with how much lookahead, and how many drafts a target wants."""
    from cluster.planner import plan as work_out

    given = _given(file)
    if traffic is not None:
        from deployments.traffic_report import show

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
    found = work_out(_validated(given))
    if as_json:
        told = {"pays": found.pays, "best": asdict(found.best), "break_even": found.break_even}
        typer.echo(json.dumps({**told, "rows": [asdict(row) for row in found.rows]}))
        return
    rows = found.table()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    best = found.best
    with_drafts = f", {best.drafts} to {best.targets} (drafts to targets)" if best.drafts else ""
    typer.echo(f"\nBest: {best.method}, {best.speedup:.2f}x{with_drafts}")
    for rule, limit in found.break_even.items():
        pays = "at any load" if limit is None else f"below about {limit:.0f} sequences in a pass"
        typer.echo(f"Rule {rule}: a draft token is worth verifying {pays}.")


def acceptance(
    prompts: Annotated[Path, typer.Argument(help="One prompt per line, or .json/.jsonl.", show_default=False)],
    url: Annotated[str, typer.Option(help="The server.", envvar="OUTRIDER_URL")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="API key.", envvar="OUTRIDER_API_KEY")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=10)] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
    as_json: AsJson = False,
) -> None:
    """Measure what the running draft achieves on prompts of yours."""
    from deployments.client import connect

    asked = [[{"role": "user", "content": text}] for text in _prompts(prompts)]
    with connect(url, key=key) as client:
        results = client.generate(
            asked, concurrency=concurrency, max_tokens=max_tokens, temperature=temperature, errors="raise"
        )
    told = achieved(results)
    if as_json:
        typer.echo(json.dumps(told))
        return
    rate = told["acceptance_rate"]
    typer.echo(f"{told['answers']} answers, {told['tokens']} tokens in {told['passes']} target passes")
    typer.echo(f"acceptance length  {told['acceptance_length']:.2f} tokens per pass")
    typer.echo("acceptance rate    " + ("no draft token was verified" if rate is None else f"{rate:.1%}"))
    typer.echo(f"plain passes       {told['plain_share']:.1%} (no draft token was there)")
    for accepted, share in told["accepted_per_pass"].items():
        typer.echo(f"  {accepted:>2} accepted  {share:6.1%}  {'#' * round(50 * share)}")


def achieved(results: Sequence[Result]) -> dict[str, Any]:
    """Acceptance over answers, from the origin of every token. A pass ends with its last token that is no draft's."""
    per_pass: Counter[int] = Counter()
    plain = 0
    for result in results:
        run = 0
        for origin in result.origins:
            if origin == "accepted":
                run += 1
                continue
            per_pass[run] += 1
            plain += origin == "plain"
            run = 0
        if run:
            per_pass[run] += 1
    passes = sum(per_pass.values())
    tokens = sum(len(result.tokens) for result in results)
    proposed = sum(result.usage.proposed_tokens for result in results)
    accepted = sum(result.usage.accepted_tokens for result in results)
    return {
        "answers": len(results),
        "tokens": tokens,
        "passes": passes,
        "acceptance_length": tokens / passes if passes else 0.0,
        "acceptance_rate": accepted / proposed if proposed else None,
        "plain_share": plain / passes if passes else 0.0,
        "accepted_per_pass": {count: per_pass[count] / passes for count in sorted(per_pass)},
    }


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
    from actors.engines.emulated_presets import draft_spec, target_spec

    reference = reference if reference.startswith("emulated:") else f"emulated:{reference}"
    spec = target_spec(reference) if name == "target" else draft_spec(reference)
    return spec.model_dump(exclude_defaults=True)


def _validated(given: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from cluster.planner import PlanInput

    try:
        return PlanInput.model_validate(given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("plan: " + "; ".join(problems)) from error


def _prompts(path: Path) -> list[str]:
    """Texts of a file: lines, a JSON list, or JSON lines with `prompt`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            found = json.loads(text)
        elif path.suffix == ".jsonl":
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = [line for line in text.splitlines() if line.strip()]
        prompts = [item if isinstance(item, str) else item["prompt"] for item in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts
