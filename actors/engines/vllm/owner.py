"""How vLLM's processes notice that the actor they work for is gone, from their first moment on.

An actor that is killed says no goodbye, and would leave an engine behind that starts, finds nobody to talk to, and
keeps its GPUs. Nothing here leans on vLLM's internals; imports no vLLM.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Any


class OwnerWatch(str):
    """A value among vLLM's settings: wherever it arrives in another process, that process ends with its maker's.

    vLLM hands its settings to every process that it starts, as the first thing it is told. As text this is always the
    same, because vLLM keys its cache of compiled code by its settings.
    """

    host: str
    process: int

    def __new__(cls, host: str | None = None, process: int | None = None) -> OwnerWatch:
        made = super().__new__(cls, "owner-watch")
        made.host = socket.gethostname() if host is None else host
        made.process = os.getpid() if process is None else process
        return made

    def __reduce__(self) -> Any:
        return _arrive, (self.host, self.process)


def _arrive(host: str, process: int) -> OwnerWatch:
    """Unpickled: begin to watch, unless that has begun, or the owner is this process or on another machine."""
    name = f"owner-watch-{process}"
    here = host == socket.gethostname() and process != os.getpid()
    if here and all(thread.name != name for thread in threading.enumerate()):
        threading.Thread(target=_end_with, args=(process,), name=name, daemon=True).start()
    return OwnerWatch(host, process)


def _end_with(owner: int) -> None:
    wait_for_end(owner)
    os._exit(1)


def wait_for_end(process: int, period_s: float = 1.0) -> None:
    """Return when a process has ended, also where nobody has asked how yet.

    period_s: how often to look where the system cannot tell.
    """
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not on Linux, or an old one
        while is_alive(process):
            time.sleep(period_s)
        return
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        ended.poll()
    finally:
        os.close(handle)


def is_alive(process: int) -> bool:
    """Is there such a process?"""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
