"""`outrider distill`: makes a draft for a target from the target's own answers."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from actors.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from actors.distillation.run import Progress, Target
    from actors.distillation.settings import DistillSettings
    from actors.distillation.store import Sample

app = typer.Typer(help="Make a draft for a target.")
Arithmetic = Literal["auto", "float32", "bfloat16"]
PLAIN_PERIOD_S = 30.0
"""Between two lines of progress, where there is no terminal to draw on."""


@app.command()
def distill(
    target: Annotated[str, typer.Argument(help="Path, hub id or demo:smollm2-135m of the target.", show_default=False)],
    prompts: Annotated[
        Path,
        typer.Option(
            help="What it will be asked: one prompt per line, or .json/.jsonl with strings, "
            '{"prompt": ...}, {"messages": [...]} or {"tokens": [...]}.',
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the draft's checkpoint goes.", show_default=False)],
    minutes: Annotated[float, typer.Option(min=0.01, help="Time for sampling and training.")] = 30.0,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft.")] = 4,
    vocabulary: Annotated[int, typer.Option(min=0, help="Token ids it may propose; 0 keeps all.")] = 12288,
    answer: Annotated[int, typer.Option(min=1, help="Longest answer sampled, in tokens.")] = 160,
    context: Annotated[int, typer.Option(min=8, help="Longest prompt and answer together.")] = 1024,
    arithmetic: Annotated[
        Arithmetic, typer.Option(help="auto: bfloat16 where the processor or the GPU has it.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: a GPU if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads on a CPU.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Prompts are plain text, not messages of a chat.")] = False,
    traffic: Annotated[
        Path | None,
        typer.Option(help="Recorded answers to train on as well: a file, or `recording.folder`."),
    ] = None,
    learning_rate: Annotated[float, typer.Option(min=1e-8, help="Peak learning rate.")] = 1.2e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of all random choices.")] = 0,
) -> None:
    """Sample TARGET's answers to the prompts, and train a draft of a few of its layers to say the same.

    Stop it at any moment (Ctrl-C): the same command goes on where it stopped. The draft appears in OUT when it is
    done, with a card of how it was made and what it is worth; serve it with draft.model: OUT.
    """
    import torch

    from actors.distillation.run import distill as run
    from actors.distillation.settings import DistillSettings

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        _check_place(out)
        settings = DistillSettings(
            layers=layers,
            vocabulary=vocabulary or None,
            minutes=minutes,
            answer=answer,
            context=context,
            learning_rate=learning_rate,
            dtype=_chosen(arithmetic, device),
            seed=seed,
        )
        chosen, ids = _prepare(target, prompts, settings, device, chat=not plain)
        with _progress() as report:
            card = run(chosen, ids, out, settings, report=report, traffic=_recorded(traffic, chosen))
    except KeyboardInterrupt:
        typer.echo("\nStopped. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    except (OutriderError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | ValueError) else 1) from error
    agreed = card["greedy_agreement"]
    typer.echo(f"{out}: greedy agreement {agreed['share']:.3f} ± {agreed['error']:.3f} on prompts kept from training")
    for row in card["acceptance"]:
        typer.echo(
            f"  {row['rule']:<10} temperature {row['temperature']:<4g} acceptance {row['rate']:.3f}, "
            f"{row['length']:.2f} tokens per pass"
        )
    typer.echo(f"Serve it with draft.model: {out}")


def _check_place(out: Path) -> None:
    """Before a model is loaded for nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; choose another place, or move it away")


def _prepare(
    reference: str, prompts: Path, settings: DistillSettings, device: str | None, *, chat: bool
) -> tuple[Target, list[tuple[int, ...]]]:
    """The target on its device, and the prompts as ids. Prompts are read first: they are what is wrong most often."""
    import torch

    from actors.distillation.prompts import read_prompts
    from actors.distillation.run import Target
    from actors.text import TextCodec
    from cluster import models, weights

    if not prompts.is_file():
        raise ConfigError(f"there is no file of prompts at {prompts}")
    tokenizer = models.load_tokenizer(reference)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{reference} has a slow tokenizer (no tokenizer.json), which the served draft could not share: "
            "save a fast one beside the target first (AutoTokenizer.from_pretrained(..., use_fast=True))"
        )
    chat = chat and bool(getattr(tokenizer, "chat_template", None))
    ids = read_prompts(prompts, TextCodec(tokenizer), settings.context - settings.answer, chat=chat)
    module = weights.load_module(reference, torch.float32).to(device or weights.default_device())
    target = Target(
        module,
        reference,
        weights.end_ids(module),
        tokenizer.save_pretrained,
        models.vocabulary_fingerprint(tokenizer),
    )
    return target, ids


def _chosen(arithmetic: Arithmetic, device: str | None) -> Literal["float32", "bfloat16"]:
    import torch

    if arithmetic != "auto":
        return arithmetic
    if (device or "cuda").startswith("cuda") and torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def _recorded(file: Path | None, target: Target) -> Iterator[Sample] | None:
    if file is None:
        return None
    from actors.distillation.recorder import recorded_fingerprint, recorded_samples

    files = sorted(file.glob("*.db")) if file.is_dir() else [file] if file.is_file() else []
    if not files:
        raise ConfigError(f"there is no recorded traffic at {file}")
    for one in files:
        if recorded_fingerprint(one) != target.fingerprint:
            raise ConfigError(f"{one} holds the traffic of a target with another vocabulary")
    return itertools.chain.from_iterable(map(recorded_samples, files))


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar per stage on a terminal, otherwise a line now and then."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(file=sys.stderr)) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=1.0, note="")
            bars.update(tasks[progress.stage], completed=progress.done, note=_note(progress))

        yield draw


class _Lines:
    """Progress as lines on standard error."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._next and progress.done < 1:
            return
        self._next = now + PLAIN_PERIOD_S
        typer.echo(f"{progress.stage:<11} {progress.done:4.0%}  {_note(progress)}", err=True)


def _note(progress: Progress) -> str:
    parts = []
    if progress.tokens:
        parts.append(f"{progress.tokens:,} tokens")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.agreement is not None:
        parts.append(f"agreement {progress.agreement:.3f}")
    if progress.seconds_left:
        parts.append(f"{_duration(progress.seconds_left)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
