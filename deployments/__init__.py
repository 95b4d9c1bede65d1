"""What users touch: the Serve application, the HTTP ingress, the Python client and the command line.

`connect` is imported when it is first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.client.client import connect

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    if name == "connect":
        from deployments.client.client import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
