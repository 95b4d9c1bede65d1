"""`outrider k8s`, `outrider grafana` and `outrider observe`: manifests, dashboards, and a local Prometheus.

`k8s` and `grafana` are typer applications to mount; `observe` is a function to register as a command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from actors.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Kubernetes manifests of a deployment.")
grafana = typer.Typer(no_args_is_help=True, help="Dashboards and alert rules.")

CHECKOUT_BASE = Path("k8s/base")
KUSTOMIZATION = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: outrider
resources:
  - {base}
patches:
  - path: rayservice.yaml
"""


@app.callback()
def _k8s() -> None:
    """Kubernetes manifests of a deployment."""


@app.command()
def render(
    config: Annotated[Path, typer.Argument(help="Deployment config (YAML).", show_default=False)],
    overlay: Annotated[
        Path | None,
        typer.Option(help="Write rayservice.yaml (a patch of the base) into this kustomize overlay. Made if missing."),
    ] = None,
    target_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a target pod. Default: what one replica needs.")
    ] = None,
    draft_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a draft pod. Default: what one replica needs.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="The kustomize base with the template. Default: k8s/base where that is, otherwise the package's, "
            "of which --overlay gets a copy.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the RayService of a deployment config.

    Without --overlay the whole RayService goes to standard output; with it, `kubectl apply -k OVERLAY` installs
    everything.
    """
    from cluster.config.deployment import load_config
    from cluster.kubernetes import manifests

    try:
        if base is None and CHECKOUT_BASE.is_dir():
            base = CHECKOUT_BASE
        template = manifests.load_template((base or manifests.BASE) / "rayservice.yaml")
        shape = manifests.PodShape(target_gpus, draft_gpus)
        loaded = load_config(config)
        if overlay is None:
            typer.echo(manifests.to_yaml(manifests.rayservice(loaded, template, shape)), nl=False)
            return
        patch = manifests.overlay_patch(loaded, template, shape)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    overlay.mkdir(parents=True, exist_ok=True)
    header = f"# Written by `outrider k8s render {config.name}`; edit that file and run it again.\n"
    (overlay / "rayservice.yaml").write_text(header + manifests.to_yaml(patch), encoding="utf-8")
    kustomization = overlay / "kustomization.yaml"
    if not kustomization.exists():
        if base is None:  # an overlay must not depend on where the package is installed
            shutil.copytree(manifests.BASE, overlay / "base", dirs_exist_ok=True)
            base = overlay / "base"
        relative = os.path.relpath(
            base.parent.resolve() / base.name, overlay.resolve()
        )  # kustomize takes no absolute paths
        kustomization.write_text(KUSTOMIZATION.format(base=relative), encoding="utf-8")
    typer.echo(f"wrote {overlay / 'rayservice.yaml'}")


@grafana.command()
def build(
    output: Annotated[Path, typer.Option(help="The monitoring component.")] = Path("k8s/components/monitoring"),
) -> None:
    """Write dashboards (JSON) and alert rules (PrometheusRule) for Kubernetes."""
    from cluster.observability.grafana.artefacts import artefacts

    for name, text in artefacts().items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {path}")


@grafana.command()
def push(
    url: Annotated[str, typer.Option(envvar="GRAFANA_URL", help="Address of Grafana, with a path if it has one.")],
    token: Annotated[
        str, typer.Option(envvar="GRAFANA_TOKEN", help="Token of a service account; better given in the environment.")
    ],
    prometheus: Annotated[
        str | None, typer.Option(help="Prometheus as Grafana reaches it: makes or corrects a data source.")
    ] = None,
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Also the alert rules, for a Grafana whose Prometheus does not have them.")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check Grafana's certificate.")] = False,
) -> None:
    """Put the dashboards into Grafana: a folder, the data source, and what differs. Safe to repeat."""
    from cluster.observability.grafana import client
    from cluster.observability.grafana.dashboards import all_dashboards

    try:
        send = client.connect(url, token, verify=not insecure)
        done = client.push(send, all_dashboards(), prometheus, alerts)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except client.GrafanaError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(
        f"folder {'created' if done.folder_created else 'there'}, data source {done.source}, alerts {done.alerts}"
    )
    typer.echo(f"dashboards: {done.written} written, {done.unchanged} unchanged")
    for path in done.urls:
        typer.echo(f"  {url.rstrip('/')}{path}")


def observe(
    address: Annotated[str, typer.Option(help="Ray cluster to look at; auto finds this machine's.")] = "auto",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Prometheus, on 127.0.0.1.")] = 9090,
    folder: Annotated[
        Path | None, typer.Option(help="Where data and configuration go. Default: a temporary folder.")
    ] = None,
) -> None:
    """Run Prometheus beside a local application, with the alert rules, and print where to look. Ctrl-C ends it."""
    import tempfile

    from cluster.observability import local_prometheus as watching
    from cluster.observability.grafana.dashboards import all_dashboards
    from deployments.runtime.local import check_port, ray_cluster

    try:
        check_port("127.0.0.1", port)
        with contextlib.ExitStack() as stack:
            place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-observe-")))
            stack.enter_context(ray_cluster(address))
            import ray

            url = stack.enter_context(watching.prometheus(place, watching.node_addresses(ray.nodes()), port))
            typer.echo(f"Prometheus  {url}\nAlerts      {url}/alerts\nTargets     {url}/targets")
            page = place / "dashboards.html"
            links = watching.graph_links(url, all_dashboards())
            page.write_text(watching.index_page(f"Outrider's dashboards at {url}", links), encoding="utf-8")
            typer.echo(f"Dashboards  {page.absolute().as_uri()}  (the queries of {len(links)} dashboards)")
            typer.echo(f"\nGrafana: outrider grafana push --url ... --prometheus {url}\nCtrl-C ends it.")
            _follow_nodes(place)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _follow_nodes(folder: Path, period_s: float = 10.0) -> None:
    """Keep the list of nodes up to date until Ctrl-C or the cluster's end."""
    import ray

    from cluster.observability import local_prometheus as watching

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(period_s)
            try:
                watching.write_targets(folder, watching.node_addresses(ray.nodes()))
            except Exception as error:  # Ray says in many ways that it is gone
                typer.echo(f"the Ray cluster is gone: {error}", err=True)
                return
