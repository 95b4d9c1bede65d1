"""`outrider rollout`: puts a draft in the place of the one that runs, and keeps it only if it is better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.errors import ConfigError
from cluster.config.serve_names import DRAFT_TIER
from deployments.cli.options import AsJson, Temperature, said

if TYPE_CHECKING:
    from deployments.runtime.rollout import Lengths, Verdict


def rollout(
    draft: Annotated[str, typer.Argument(help="The draft: a path, a hub id or demo:draft.", show_default=False)],
    address: Annotated[
        str, typer.Option(help="The Ray cluster that serves (`auto`: the one of this machine).")
    ] = "auto",
    application: Annotated[str, typer.Option(help="Its application.")] = "outrider",
    passes: Annotated[int, typer.Option(min=2, help="Passes to measure before and after, per sequence.")] = 2000,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Ask these and measure on the answers; default: the traffic as it comes."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer to --prompts.")] = 128,
    temperature: Temperature = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers to --prompts at once.")] = 4,
    dtype: Annotated[str | None, typer.Option(help="Of the draft's weights; default: as now.")] = None,
    engine_kwargs: Annotated[
        str | None, typer.Option(help="draft.engine_kwargs as JSON; default: as now.", show_default=False)
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that the draft may take to come.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Try DRAFT on a running application: it stays if its acceptance length is higher by more than chance.

    Neither the target tier nor anything under way is touched: while drafts are exchanged, answers are decoded
    plainly. Exit code 0: kept, 1: the old draft is back.
    """
    from deployments.runtime.local import quiet_serve, ray_cluster
    from deployments.runtime.rollout import roll_out
    from deployments.runtime.served_application import ServedApplication

    asked = None if prompts is None else _messages(prompts)
    with ray_cluster(address):
        quiet_serve()
        served = ServedApplication(application, limit)
        model = str(Path(draft).resolve()) if Path(draft).is_dir() else draft  # replicas run in folders of their own
        changes = {"model": model, "dtype": dtype, "engine_kwargs": _parsed(engine_kwargs)}
        choice = served.choice().model_copy(update={k: v for k, v in changes.items() if v is not None})
        _check(served, choice)
        sampling = {"max_tokens": max_tokens, **said(temperature=temperature)}
        verdict = roll_out(
            served,
            choice,
            lambda: _measured(served, application, asked, passes, concurrency, sampling),
            report=lambda line: typer.echo(line, err=True),
            limit_s=limit,
        )
        if as_json:
            typer.echo(json.dumps(verdict.as_json()))
        else:
            for line in table(verdict):
                typer.echo(line)
        if verdict.kept and served.is_declared:
            told = json.dumps({"name": DRAFT_TIER, "user_config": choice.model_dump(mode="json")})
            typer.echo(f"Put this under `deployments` of the file that you deploy: {told}")
    raise typer.Exit(0 if verdict.kept else 1)


def table(verdict: Verdict) -> list[str]:
    """Lines of text."""
    lines = [f"{'':<4}{'draft':<44}{'passes':>10}{'tokens per pass':>20}"]
    for name, choice, found in (("old", verdict.old, verdict.before), ("new", verdict.new, verdict.after)):
        lines.append(
            f"{name:<4}{choice.model[-42:]:<44}{found.passes:>10,}{found.length:>12.3f} ± {found.length_error:.3f}"
        )
    lines.append("kept" if verdict.kept else "not better by more than chance (one-sided 5 %): the old draft is back")
    return lines


def _measured(
    served: Any,
    application: str,
    asked: list[list[dict[str, str]]] | None,
    passes: int,
    concurrency: int,
    sampling: dict[str, Any],
) -> Lengths:
    from deployments.client.client import connect
    from deployments.runtime.rollout import Lengths, live, of_results

    if asked is None:
        return live(served.status, passes, skip=passes // 10)
    found, turn = Lengths(), 0
    with connect("auto", application=application) as client:
        while found.passes < passes:  # the same questions with other seeds, until there are enough passes
            seeded = sampling | {"seed": turn}
            found += of_results(client.generate(asked, concurrency=concurrency, errors="raise", **seeded))
            turn += 1
    return found


def _check(served: Any, choice: Any) -> None:
    """Whether the draft can be had, and fits, before anything is touched. Raises ConfigError and its like."""
    from cluster.models.factory import prepare

    prepare(served.config.with_draft(choice))


def _messages(file: Path) -> list[list[dict[str, str]]]:
    from deployments.cli.acceptance import read_texts

    return [[{"role": "user", "content": text}] for text in read_texts(file)]


def _parsed(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine-kwargs is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError("--engine-kwargs must be a JSON object")
    return found
