"""Prints the project's dependencies and those of the extras named, one a line: pip has no "dependencies only".

Installing the project itself would put a second copy of it on the path, beside the one in the application's folder.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Requirements from pyproject.toml's text. Raises KeyError for an extra that is not there."""
    project = tomllib.loads(pyproject)["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2:])))
