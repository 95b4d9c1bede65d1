"""Where a Ray cluster that is started here keeps its sockets: paths of Unix sockets are short.

A session's sockets lie at FOLDER/ray/session_2026-12-01_04-29-29_123456_1234567/sockets/plasma_store, 68 bytes behind
the folder's own, and no socket's path may be longer than 107 (sun_path in unix(7)). TMPDIR of batch systems and of
macOS is longer than the 39 that are left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from actors.errors import ConfigError

LONGEST_BYTES = 39
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def environment(found: Mapping[str, str], short: Sequence[str] = SHORT) -> dict[str, str]:
    """What Ray must find besides `found`, this process's environment, so that its sockets have room.

    Raises ConfigError when RAY_TMPDIR itself is too long, or no short folder can be written.
    """
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in found else "TMPDIR"
    if len(os.fsencode(found.get(name, ""))) <= LONGEST_BYTES:
        return {}
    if name == "TMPDIR":
        for folder in short:
            if os.access(folder, os.W_OK | os.X_OK):
                return {"RAY_TMPDIR": folder}
    raise ConfigError(
        f"{name} has more than {LONGEST_BYTES} characters, which leaves no room for the names of Ray's sockets: set "
        "RAY_TMPDIR to a folder with a shorter path"
    )
