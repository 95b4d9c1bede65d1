"""`outrider acceptance`: what a draft is worth to a target, of two models or as a server achieves it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.errors import ConfigError
from actors.messages import DRAFTED
from deployments.cli.options import AsJson, Key, client_of, said
from deployments.client.address import DEFAULT_URL

if TYPE_CHECKING:
    from cluster.distillation.evaluation import Acceptance
    from cluster.distillation.pair import Overlap
    from deployments.client.results import Result

EXAMPLES = (
    "Examples:\n\n"
    "outrider acceptance demo:smollm2-135m demo:draft --prompts prompts.txt    two models, every rule\n\n"
    "outrider acceptance --prompts prompts.txt                                 what a running server's draft achieves"
)
"""The end of the command's help."""


def acceptance(
    prompts: Annotated[Path, typer.Option(help="One prompt per line, or .json/.jsonl.", show_default=False)],
    target: Annotated[str | None, typer.Argument(help="The target's model.", show_default=False)] = None,
    draft: Annotated[str | None, typer.Argument(help="The draft's model.", show_default=False)] = None,
    url: Annotated[
        str, typer.Option(help="Without models: the server whose draft is measured.", envvar="OUTRIDER_URL")
    ] = DEFAULT_URL,
    key: Key = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=10, help="Default: the model's own where it has one, otherwise 1.")
    ] = None,
    lookahead: Annotated[int, typer.Option(min=1, max=64, help="Draft tokens per pass (with models).")] = 4,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of the draft's layers (an early exit).")
    ] = None,
    plot: Annotated[Path, typer.Option(help="Where the plot is saved (with models).")] = Path("acceptance.png"),
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at once (without models).")] = 4,
    as_json: AsJson = False,
) -> None:
    """Measure a pair of models under every rule; without models, what a running server's draft achieves."""
    if (target is None) != (draft is None):
        raise ConfigError("name both models, the target's and the draft's, or none to measure a running server")
    if target is None or draft is None:
        _of_server(prompts, url, key, max_tokens, temperature, concurrency, as_json)
        return
    if temperature is None:
        from cluster.models.default_sampling import of_model

        temperature = of_model(target).get("temperature", 1.0)
    overlap, rules = _of_pair(target, draft, prompts, max_tokens, temperature, lookahead, layers)
    if as_json:
        typer.echo(json.dumps({"pair": overlap.as_json(), "rules": [rule.as_json() for rule in rules]}))
    else:
        for line in table(overlap, rules):
            typer.echo(line)
    if save_plot(overlap, rules, plot):
        typer.echo(f"plot: {plot}", err=True)
    else:
        typer.echo("no plot: install outrider[plot]", err=True)


# -- two models --------------------------------------------------------------------------------------------------------


def _of_pair(
    target: str, draft: str, prompts: Path, tokens: int, temperature: float, lookahead: int, layers: int | None
) -> tuple[Overlap, list[Acceptance]]:
    from actors.text.codec import TextCodec
    from cluster.distillation.evaluation import acceptance as measured
    from cluster.distillation.pair import overlap
    from cluster.distillation.prompts import read_prompts
    from cluster.models.factory import check_vocabularies
    from cluster.models.references import load_tokenizer
    from cluster.models.weights import load_model

    if not prompts.is_file():
        raise ConfigError(f"there is no file of prompts at {prompts}")
    check_vocabularies(target, draft, "model")
    tokenizer = load_tokenizer(target)
    models = load_model(target), load_model(draft, layers=layers)
    longest = min(getattr(model.module.config, "max_position_embeddings", 2**20) for model in models)
    room = longest - tokens - lookahead - 1
    if room < 1:
        raise ConfigError(f"--max-tokens {tokens} leaves no room for a prompt in {longest} positions")
    chat = bool(getattr(tokenizer, "chat_template", None))
    asked = read_prompts(prompts, TextCodec(tokenizer), room, chat=chat)
    rules = [
        measured(*models, asked, rule=rule, temperature=temperature, tokens=tokens, lookahead=lookahead)
        for rule in (("coupled", "rejection", "block", "typical") if temperature > 0 else ("coupled",))
    ]
    return overlap(*models, asked, temperature=temperature, tokens=tokens), rules


def table(overlap: Overlap, rules: Sequence[Acceptance]) -> list[str]:
    """Lines of text."""
    from cluster.distillation.pair import expected_length

    guesses = ", ".join(f"{n}: {share:.1%}" for n, share in overlap.corrections.items())
    lookahead = rules[0].lookahead
    places = "".join(f"{place + 1:>8}" for place in range(lookahead))
    lines = [
        f"temperature {overlap.temperature:g}, {overlap.positions} positions of the target's own answers",
        f"1 - TV(p, q)             {overlap.overlap:.3f} ± {overlap.overlap_error:.3f}",
        f"first guess right        {overlap.first:.3f} (noise shared)",
        f"else within n guesses    {guesses}",
        "",
        f"{'rule':<11}{'per token':>16}{'tokens/pass':>15}{'expected':>10}   accepted at place{places}",
    ]
    for rule in rules:
        name = "every rule" if overlap.temperature == 0 else rule.rule
        shares = "".join(f"{accepted / tested:>8.2f}" if tested else f"{'-':>8}" for accepted, tested in rule.places)
        lines.append(
            f"{name:<11}{rule.rate:>8.3f} ± {rule.rate_error:.3f}{rule.length:>9.2f} ± {rule.length_error:.2f}"
            f"{expected_length(rule.rate, lookahead):>10.2f}   {'':>17}{shares}"
        )
    lines.append(f"expected: (1 - a^(k+1)) / (1 - a) with a as measured and k = {lookahead}; typical is relaxed")
    return lines


def save_plot(overlap: Overlap, rules: Sequence[Acceptance], path: Path) -> bool:
    """Acceptance by place in the block, a line per rule. False when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    for rule in rules:
        shares = [accepted / tested if tested else float("nan") for accepted, tested in rule.places]
        axis.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{rule.rule}: {rule.length:.2f} tokens/pass")
    axis.axhline(overlap.overlap, color="grey", linestyle=":", label="1 - TV(p, q)")
    axis.set(xlabel="place in the block", ylabel="accepted, given all before", ylim=(0, 1.02))
    axis.set_xticks(range(1, rules[0].lookahead + 1))
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return True


# -- a running server --------------------------------------------------------------------------------------------------


def _of_server(
    prompts: Path, url: str, key: str | None, tokens: int, temperature: float | None, concurrency: int, as_json: bool
) -> None:
    asked = [[{"role": "user", "content": text}] for text in read_texts(prompts)]
    with client_of(url, key) as client:
        sampling: dict[str, Any] = {"max_tokens": tokens, **said(temperature=temperature)}
        results = client.generate(asked, concurrency=concurrency, errors="raise", **sampling)
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
            if origin in DRAFTED:
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


def read_texts(path: Path) -> list[str]:
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
