"""Files that are complete or not there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.errors import ConfigError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_whole(path: Path, data: bytes) -> None:
    """Write `path` so that it holds `data` or what it held before, whatever happens meanwhile."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to be filled; it appears under the name `path` when the block ends, and not at all when it fails.

    Raises ConfigError if `path` exists and is not empty.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists already; choose another place, or move it away")
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.replace(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn errors of the disk under `folder` into ConfigErrors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ConfigError(
                f"no space is left on the disk of {folder}; what was done so far is kept: "
                "make room and give the same command again"
            ) from error
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
