"""vLLM is optional: everything imports without it, and a configuration that asks for it is told so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PACKAGES = ("actors", "cluster", "deployments")
IN_VLLMS_PROCESSES = {"actors.engines.vllm.internals"}

SCRIPT = """
import importlib, sys
sys.modules["vllm"] = None  # as if it were not installed
for name in sys.argv[1:]:
    importlib.import_module(name)
from actors.engines.vllm.plan import check_version
from actors.errors import ConfigError
try:
    check_version()
except ConfigError as error:
    print(error)
"""


def names() -> list[str]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return [name for name in found if not name.endswith("__init__") and name not in IN_VLLMS_PROCESSES]


def test_everything_imports_without_vllm() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "needs vLLM, which is not installed" in ran.stdout
