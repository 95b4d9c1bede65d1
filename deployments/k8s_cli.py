"""`outrider k8s` and `outrider grafana`: manifests and dashboards from the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from actors.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Kubernetes manifests of a deployment.")

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
    base: Annotated[Path, typer.Option(help="The kustomize base with the template.")] = Path("k8s/base"),
) -> None:
    """Write the RayService of a deployment config.

    Without --overlay the whole RayService goes to standard output; with it, `kubectl apply -k OVERLAY` installs
    everything.
    """
    from cluster import manifests
    from cluster.config import load_config

    try:
        template = manifests.load_template(base / "rayservice.yaml")
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
        relative = os.path.relpath(base.resolve(), overlay.resolve())  # kustomize takes no absolute paths
        kustomization.write_text(KUSTOMIZATION.format(base=relative), encoding="utf-8")
    typer.echo(f"wrote {overlay / 'rayservice.yaml'}")
