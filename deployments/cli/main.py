"""The command line. What a command needs is imported when it runs, so that `--help` is instant.

Exit codes: 0 done (and for a server that was told to stop), 1 the server or a request failed, 2 the command, its
configuration or its input is wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.errors import ConfigError, OutriderError, RequestError
from deployments.cli.options import AsJson, Key, Url, client_of
from deployments.client.address import DEFAULT_URL

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serves a large language model faster without changing what it says.\n\n"
    "Start with [bold]outrider demo[/bold]: a real model on this machine, compared with plain decoding.",
)
models_app = typer.Typer(no_args_is_help=True, help="Model references and their local copies.")
config_app = typer.Typer(no_args_is_help=True, help="Deployment configurations.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys.")
app.add_typer(keys_app, name="keys")
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("outrider"))
        except PackageNotFoundError:  # run from a source tree on PYTHONPATH
            typer.echo("unknown")
        raise typer.Exit


ConfigPath = Annotated[
    Path, typer.Argument(help="YAML, as `serve deploy` takes it; `demo` is the demo's own.", show_default=False)
]


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """What holds for all commands; the help text is the application's."""


@app.command(
    epilog="Examples:\n\n"
    "outrider serve demo                      the demo's small model, at http://127.0.0.1:8000\n\n"
    "outrider serve MODEL --draft DRAFT       a folder or hub id; --api-key, --port, --set target.settings.slots=8\n\n"
    "outrider serve my.yaml --address auto    on the Ray cluster of this machine\n\n"
    "outrider config check my.yaml            says what is wrong with it, and starts nothing"
)
def serve(
    config: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODEL",
            help="YAML, as `serve deploy` takes it; `demo` is the demo's own. Or a model: a folder, or a hub id.",
            show_default=False,
        ),
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            help="With MODEL: the draft's model, `prompt_lookup`, `suffix` or `none`. Default: prompt_lookup."
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="With MODEL: the key that clients must send.")] = None,
    name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="With MODEL: what clients call it. Default: its hub id."),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="With MODEL: where the configuration is written. Default: a state folder.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Instead of ingress.host.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of ingress.port.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Run on this Ray cluster (`auto`: the one of this machine) instead of a new one.")
    ] = None,
) -> None:
    """Serve a configuration, or a model by its name, until interrupted.

    Ctrl-C and SIGTERM end it within seconds, and break off what is under way.

    Exit code 0 when it was stopped while serving, 130 while it was starting.
    """
    from deployments.cli import quick_config
    from deployments.runtime.local import application as running
    from deployments.runtime.local import check_port, interruptible, wait_for_interrupt

    said = [
        f"ingress.{key}={json.dumps(value)}" for key, value in (("host", host), ("port", port)) if value is not None
    ]
    if quick_config.is_file(config):
        only = {"--draft": draft, "--api-key": api_key, "--served-model-name": name, "--save": save}
        for option in (option for option, value in only.items() if value is not None):
            raise ConfigError(f"{option} goes with a MODEL; {config} is a file, which says it itself, or --set does")
        loaded = quick_config.changed(_load(Path(config)), [*(changes or []), *said])
    else:
        raw = quick_config.settings_of(config, draft, name, [*(changes or []), *said])
        path = save or quick_config.default_path(raw)
        loaded = quick_config.write(path, raw, api_key)
        _say(f"Configuration: {path}")
    if address is None:
        check_port(loaded.ingress.host, loaded.ingress.port)
        _prepare(loaded)
    with interruptible(_say), _started(address, loaded.ingress.proxy), running(loaded, _say) as url:
        _say(f"Serving {loaded.model_id} at {url}/v1 (Ctrl-C stops it)")
        wait_for_interrupt()


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="Stop after the table.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8000, or any that is free.")] = None,
) -> None:
    """Serve a small real model with a draft on this machine, and compare with plain decoding."""
    from deployments.cli.demo import run
    from deployments.runtime.local import interruptible

    with interruptible(_say):
        raise typer.Exit(run(once=once, port=port))


@app.command(
    epilog="Examples:\n\n"
    "watch outrider status\n\n"
    "outrider status --json | jq .target    numbers for machines\n\n"
    "until outrider status; do sleep 1; done    waits until both tiers can serve"
)
def status(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Both tiers: replicas, their load, what is accepted, and what the controllers are doing.

    Exit code 1 when the server is not ready.
    """
    with client_of(url, key) as client:
        told = client.status()
        ready = bool(told["ready"] if "ready" in told else client.ready())  # one look at both tiers, not two
    if as_json:
        typer.echo(json.dumps({**told, "ready": ready}))
        raise typer.Exit(0 if ready else 1)
    from rich.console import Console
    from rich.table import Column, Table

    from deployments.cli.explain import status_rows

    title = f"{url}: {'ready' if ready else 'not ready'}, {told.get('sessions', 0)} requests under way"
    table = Table("tier", Column("replica", no_wrap=True), "load", "controllers", title=title)
    for row in status_rows(told):
        table.add_row(*row)
    Console().print(table)
    raise typer.Exit(0 if ready else 1)


@models_app.command()
def fetch(
    reference: Annotated[str, typer.Argument(help="Local path, hub id, demo:smollm2-135m or demo:draft.")],
) -> None:
    """Bring a model to this machine, and print where it is."""
    from cluster.models.references import fetch, progress_bar

    with progress_bar() as progress:
        folder = fetch(reference, progress)
    typer.echo(folder)


@config_app.command()
def check(config: ConfigPath, as_json: AsJson = False) -> None:
    """Read a configuration and say whether it can be deployed; with --json, print it with all defaults."""
    loaded = _load(config)
    typer.echo(loaded.model_dump_json(indent=2) if as_json else f"{config}: a valid deployment of {loaded.model_id}")


@config_app.command()
def reference() -> None:
    """Print every setting with its type, default and meaning, as Markdown."""
    from cluster.config.reference import reference as text

    typer.echo(text(), nl=False)


@keys_app.command()
def new(
    name: Annotated[str, typer.Argument(help="Who the key is for.", show_default=False)],
) -> None:
    """Make an API key: it is printed once; the keys file (ingress.keys_file) holds its hash."""
    from deployments.ingress.auth import key_hash, new_key

    key = new_key()
    _say(f"Key of {name}, shown only now; add the line below to `keys:` in the keys file:\n{key}")
    typer.echo(f"  - {{name: {json.dumps(name)}, sha256: {key_hash(key)}}}")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors made on purpose become one line and an exit code."""
    add_groups()
    if threading.current_thread() is threading.main_thread():
        # A shell's background jobs start with interrupts ignored: `outrider serve FILE &` could not be interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(arguments)
    except (ConfigError, RequestError) as error:
        _fail(error, 2)
    except OutriderError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: OutriderError, code: int) -> None:
    print(f"outrider: {error}", file=sys.stderr)
    sys.exit(code)


def add_groups() -> None:
    """Command groups that live in modules of their own."""
    if any(group.name == "k8s" for group in app.registered_groups):
        return
    from deployments.cli import acceptance, answer, batch, bench, distill, kubernetes, plan, rollout

    app.command(epilog=answer.EXAMPLES)(answer.generate)
    app.command()(answer.chat)
    app.command(epilog=batch.EXAMPLES)(batch.batch)
    app.command(epilog=bench.EXAMPLES)(bench.bench)
    app.command(epilog=plan.EXAMPLES)(plan.plan)
    app.command(epilog=acceptance.EXAMPLES)(acceptance.acceptance)
    app.command()(distill.distill)
    app.command()(rollout.rollout)
    app.command()(kubernetes.observe)
    app.add_typer(kubernetes.app, name="k8s")
    app.add_typer(kubernetes.grafana, name="grafana")


def _load(path: Path) -> Any:
    from cluster.config.deployment import load_config

    return load_config(Path(__file__).parents[1] / "demo.yaml" if str(path) == "demo" else path)


def _prepare(config: Any) -> None:
    from cluster.models.factory import prepare
    from cluster.models.references import progress_bar

    if config.ingress.keys_file is not None:
        from deployments.ingress.auth import read_keys

        read_keys(config.ingress.keys_file)

    with progress_bar() as progress:
        prepare(config, progress)


def _started(address: str | None, proxy: Any) -> Any:
    """A connection to Ray, which takes a while to come."""
    from deployments.runtime.local import ray_cluster

    _say("Starting Ray" if address is None else f"Connecting to Ray at {address}")
    return ray_cluster(address, proxy)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
