"""What produced the figures: commit, versions, command line, hardware."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("ray", "torch", "transformers", "pydantic", "numpy", "vllm")
ROOT = Path(__file__).resolve().parents[2]
MACHINE = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def provenance() -> dict[str, Any]:
    """Everything, for files."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "argv": sys.argv,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def heading(subject: str = "") -> str:
    """Two lines above a report: what is measured and where, and what measures it. Imports torch."""
    import torch

    where = f"{torch.get_num_threads()} thread(s), {processor()}, {torch.backends.cpu.get_cpu_capability()}"
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
    return (
        f"{subject + ', ' if subject else ''}{where}\n"
        f"commit {_git('rev-parse', '--short', 'HEAD') or 'unknown'}, python {platform.python_version()}, {versions}; "
        f"{command()}"
    )


def command() -> str:
    """The command that repeats this run."""
    return f"python -m benchmarks {shlex.join(sys.argv[1:])}"


def processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
