"""Whose a Ray cluster is that `auto` found: on a machine of several users it may be another one's."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.errors import ConfigError


def refuse_others(address: str, found: Mapping[str, Any], user: int | None = None) -> None:
    """Raises ConfigError when `auto` led to a cluster that another user of this machine runs.

    found: `address_info` of what `ray.init` returned. Nothing is asked where an address was named, here or in
    RAY_ADDRESS. user: id of the one who asks; None: this process's.
    """
    if address != "auto" or os.environ.get("RAY_ADDRESS"):
        return
    try:
        owner = Path(str(found.get("session_dir"))).stat().st_uid
    except OSError:  # a session without a folder on this machine was not found by looking around on it
        return
    if owner != (os.getuid() if user is None else user):
        raise ConfigError(
            f"the Ray cluster of this machine is {_name(owner)}'s: to use it all the same, name it: "
            f"{found.get('gcs_address') or found.get('address') or 'HOST:PORT'}"
        )


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
