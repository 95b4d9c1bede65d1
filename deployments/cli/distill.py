"""`outrider distill`: makes a draft for a target from the target's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actors.errors import ConfigError, OutriderError
from deployments.cli import distill_inputs as inputs
from deployments.cli.distill_progress import shown

if TYPE_CHECKING:
    from cluster.distillation.prompts import Ids
    from cluster.distillation.settings import DistillSettings
    from cluster.distillation.start import Start

app = typer.Typer(help="Make a draft for a target.")
Arithmetic = Literal["auto", "float32", "bfloat16"]
_LAYERS, _VOCABULARY, _SAMPLING_SHARE, _OWN_PROMPTS = 4, 12288, 0.4, 4000


@app.command()
def distill(
    target: Annotated[str, typer.Argument(help="Path, hub id or demo:smollm2-135m of the target.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where the draft's checkpoint goes.", show_default=False)],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="What it will be asked: one prompt per line, or .json/.jsonl with strings, "
            '{"prompt": ...}, {"messages": [...]} or {"tokens": [...]}; default: those of --traffic, or of its own.',
            show_default=False,
        ),
    ] = None,
    own_prompts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts that TARGET writes itself, besides the others. "
            f"[default: {_OWN_PROMPTS} without --prompts and --traffic, otherwise 0]",
        ),
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(
            help="Recorded answers to train on as well: a file, `recording.folder`, or another run's samples."
        ),
    ] = None,
    held: Annotated[
        Path | None,
        typer.Option(help="Prompts to evaluate on, not trained on; default: some of --prompts are kept from training."),
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="A draft to begin from (path or demo:draft); default: layers of the target.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time for sampling and training.")] = 30.0,
    sampling_share: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.99, help=f"Of the time, for sampling; 0 with --traffic. [default: {_SAMPLING_SHARE}]"
        ),
    ] = None,
    kind: Annotated[
        Literal["layers", "hidden_states"],
        typer.Option(
            help="layers: a small causal LM cut out of TARGET. hidden_states: one layer that reads TARGET's hidden "
            "states (EAGLE-3's form), served as draft.kind hidden_states."
        ),
    ] = "layers",
    layers: Annotated[
        int | None, typer.Option(min=1, help=f"Layers of the draft. [default: those of --start, or {_LAYERS}]")
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Token ids it may propose; 0 keeps all. [default: those of --start, or {_VOCABULARY}]"
        ),
    ] = None,
    answer: Annotated[int, typer.Option(min=1, help="Longest answer sampled, in tokens.")] = 160,
    context: Annotated[int, typer.Option(min=8, help="Longest prompt and answer together.")] = 1024,
    arithmetic: Annotated[
        Arithmetic, typer.Option(help="auto: bfloat16 where the processor or the GPU has it.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: a GPU if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads on a CPU.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Prompts are plain text, not messages of a chat.")] = False,
    learning_rate: Annotated[float, typer.Option(min=1e-8, help="Peak learning rate.")] = 1.2e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of all random choices.")] = 0,
    through: Annotated[
        str | None,
        typer.Option(
            help="Have a running Outrider or vLLM answer the prompts: its URL; `auto`: this machine's, where it serves "
            "TARGET. Default: TARGET is sampled here.",
            show_default=False,
        ),
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="What that server calls TARGET, if it has several.")] = None,
    key: Annotated[str | None, typer.Option(help="Its API key.", envvar="OUTRIDER_API_KEY")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to it at once.")] = 32,
) -> None:
    """Sample TARGET's answers, and train a draft of a few layers to say the same. Without prompts TARGET writes them.

    Stop it at any moment (Ctrl-C): the same command goes on where it stopped. The draft appears in OUT when it is
    done, with a card of how it was made and what it is worth; serve it with draft.model: OUT.

    Under `accelerate launch --num_processes N -m deployments.cli.main distill ...` N GPUs train together; the first one
    samples (or --through a server), and evaluates.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    options: dict[str, Any] = {
        "minutes": minutes,
        "kind": kind,
        "sampling_share": _SAMPLING_SHARE if sampling_share is None else sampling_share,
        "answer": answer,
        "context": context,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    try:
        _check_place(out)
        options["dtype"] = _chosen(arithmetic, device)
        server = None if through is None else inputs.Server(through, key, served_model, concurrency)
        asked = _Asked(
            target, out, prompts, own_prompts, traffic, held, start, server, layers, vocabulary, device, chat=not plain
        )
        card = _run(asked, options)
    except KeyboardInterrupt:
        typer.echo("\nStopped. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    except (OutriderError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | ValueError) else 1) from error
    if card is None:  # one of several processes, and not the first
        return
    agreed = card["greedy_agreement"]
    typer.echo(f"{out}: greedy agreement {agreed['share']:.3f} ± {agreed['error']:.3f} on prompts kept from training")
    for row in card["acceptance"]:
        typer.echo(
            f"  {row['rule']:<10} temperature {row['temperature']:<4g} acceptance {row['rate']:.3f}, "
            f"{row['length']:.2f} tokens per pass"
        )
    if start is not None and held is None:
        typer.echo(f"{start} may have been trained on the prompts kept here: give --held FILE to be sure")
    typer.echo(f"Serve it with draft.model: {out}" + (f", draft.kind: {kind}" if kind == "hidden_states" else ""))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The command's arguments that are about things to be loaded."""

    target: str
    out: Path
    prompts: Path | None
    own_prompts: int | None
    traffic: Path | None
    held: Path | None
    start: str | None
    server: inputs.Server | None
    layers: int | None
    vocabulary: int | None
    device: str | None
    chat: bool


def _run(asked: _Asked, options: dict[str, Any]) -> dict[str, Any] | None:
    from cluster.distillation.parallel import launched
    from cluster.distillation.run import assist
    from cluster.distillation.run import distill as run
    from cluster.distillation.settings import DistillSettings
    from cluster.models.references import vocabulary_fingerprint

    own = asked.own_prompts
    if own is None:
        own = _OWN_PROMPTS if asked.prompts is None and asked.traffic is None else 0
    if own == 0 and asked.prompts is None and asked.traffic is None:
        raise ConfigError("there is nothing to ask: leave --own-prompts out, or give --prompts or --traffic")
    base = DistillSettings(**options, layers=1)
    # What is wrong most often is read first: before any weights.
    tokenizer, limit = inputs.load_tokenizer(asked.target), base.context - base.answer
    fingerprint = vocabulary_fingerprint(tokenizer)
    recorded = None if asked.traffic is None else inputs.Recorded(asked.traffic, fingerprint)
    held = None if asked.held is None else inputs.load_prompts(asked.held, tokenizer, limit, chat=asked.chat)
    ids: list[Ids] = []
    if asked.prompts is not None:
        ids = inputs.load_prompts(asked.prompts, tokenizer, limit, chat=asked.chat)
    elif recorded is not None:
        ids = recorded.prompts(limit)
    start = None if asked.start is None else inputs.load_start(asked.start, fingerprint)
    settings = DistillSettings(
        **options,
        start=asked.start,
        layers=asked.layers or _layers(start, base),
        vocabulary=_vocabulary(asked.vocabulary, asked.start),
    )
    group = launched()
    device = asked.device if group is None else group.device
    target = inputs.load_target(asked.target, tokenizer, device)
    if group is not None and group.rank > 0:
        assist(target, asked.out, settings, group, start=start)
        group.close()
        return None
    if own:
        ids += inputs.own_prompts(target, tokenizer, asked.out, settings, own, chat=asked.chat, say=_say)
        ids = list(dict.fromkeys(ids))
    source = None if asked.server is None else asked.server.source(target, ids[0], settings, _say)
    with shown() as report:
        card = run(
            target,
            ids,
            asked.out,
            settings,
            report=report,
            traffic=recorded,
            start=start,
            held=held,
            source=source,
            group=group,
        )
    if group is not None:
        group.close()
    return card


def _layers(start: Start | None, base: DistillSettings) -> int:
    if start is not None:
        return start.layers
    return 1 if base.kind == "hidden_states" else _LAYERS


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _vocabulary(wanted: int | None, start: str | None) -> int | Literal["start"] | None:
    if wanted is None:
        return "start" if start is not None else _VOCABULARY
    return wanted or None


def _check_place(out: Path) -> None:
    """Before a model is loaded for nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; choose another place, or move it away")


def _chosen(arithmetic: Arithmetic, device: str | None) -> Literal["float32", "bfloat16"]:
    import torch

    if arithmetic != "auto":
        return arithmetic
    if (device or "cuda").startswith("cuda") and torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu.get_capabilities().get("avx512_bf16") else "float32"
