"""What all commands that talk to a server are told: where it is, the key, and the form of the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deployments.client.client import Client


Url = Annotated[str, typer.Option(help="The server.", envvar="OUTRIDER_URL")]
Key = Annotated[str | None, typer.Option(help="API key, if the server asks for one.", envvar="OUTRIDER_API_KEY")]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=10, help="Default: the server's, which is its model's own where it has one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


def client_of(url: str, key: str | None) -> Client:
    """A client of that server; imported only now, so that `--help` is instant."""
    from deployments.client.client import connect

    return connect(url, key=key)


def said(**options: float | None) -> dict[str, float]:
    """Those that were given; the server has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}
