"""The shape of the code: who may import whom, what stays lazy, and that the packages come from this repository."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "cluster", "deployments")
FORBIDDEN = {
    "actors": {"cluster", "deployments", "fastapi", "starlette", "uvicorn"},
    "cluster": {"deployments", "fastapi", "starlette", "uvicorn"},
    "deployments": set(),
    "actors/algorithms": {"ray", "transformers", "vllm", "cluster", "deployments"},
}
HEAVY = {"torch", "transformers", "vllm", "ray", "matplotlib"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names imported anywhere in the file, and dotted ones of this project."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_run_one_way(folder: str) -> None:
    for path in modules(folder):
        top = {name.split(".")[0] for name in imported(path)}
        assert not top & FORBIDDEN[folder], f"{path.relative_to(ROOT)} imports {top & FORBIDDEN[folder]}"


def test_algorithms_know_no_engines_and_no_actors() -> None:
    allowed = {"actors.algorithms", "actors.messages", "actors.settings", "actors.errors", "actors.engines.protocol"}
    for path in modules("actors/algorithms"):
        ours = {name for name in imported(path) if name.split(".")[0] == "actors"}
        strangers = {name for name in ours if not any(name == a or name.startswith(a + ".") for a in allowed)}
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


# What the modules of a folder must not import: each line is a direction in which nothing may flow.
STRANGERS = {
    "actors/algorithms": {"actors.orchestrator", "actors.target", "actors.draft", "actors.replica", "actors.transport"},
    "actors/engines": {
        "actors.orchestrator",
        "actors.draft",
        "actors.replica",
        "actors.target.actor",
        "actors.target.vllm_actor",
        "actors.target.scheduler",
        "actors.transport.links",
        "actors.transport.connection",
    },
    "actors/transport": {"actors.algorithms", "actors.orchestrator", "actors.target", "actors.draft", "actors.replica"},
    "actors/text": {"actors.algorithms", "actors.engines", "actors.orchestrator", "actors.target", "actors.transport"},
    "actors/draft": {"actors.orchestrator", "actors.target"},
    "actors/target": {"actors.orchestrator", "actors.draft"},
    "cluster/planning": {"cluster.observability", "cluster.kubernetes", "cluster.models", "actors.orchestrator"},
}


@pytest.mark.parametrize("folder", STRANGERS)
def test_folders_keep_to_their_subject(folder: str) -> None:
    for path in modules(folder):
        strangers = {
            name
            for name in imported(path)
            for stranger in STRANGERS[folder]
            if name == stranger or name.startswith(stranger + ".")
        }
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_transport_knows_no_engine() -> None:
    """But for the card by which an engine introduces itself."""
    for path in modules("actors/transport"):
        engines = {name for name in imported(path) if name.startswith("actors.engines")}
        assert engines <= {"actors.engines.protocol"}, path


@pytest.mark.parametrize("package", PACKAGES)
def test_benchmarks_and_tests_are_imported_by_nothing(package: str) -> None:
    for path in modules(package):
        assert not {name.split(".")[0] for name in imported(path)} & {"benchmarks", "tests"}, path


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_show_the_subjects(package: str) -> None:
    """A folder with more modules side by side than one can take in has become a heap."""
    folders = {path.parent for path in modules(package)}
    crowded = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert not {folder: count for folder, count in crowded.items() if count > 26}


def test_the_packages_are_this_repositorys() -> None:
    code = "import actors, cluster, deployments; print(actors.__file__, cluster.__file__, deployments.__file__)"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed == [str(ROOT / package / "__init__.py") for package in PACKAGES]


@pytest.mark.parametrize(
    "code", ["import deployments.cli.main", "import deployments", "import cluster.config.deployment"]
)
def test_nothing_heavy_is_imported_to_print_help(code: str) -> None:
    script = f"import sys; {code}; print(*({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_tiers_without_a_model_of_torchs_do_without_torch() -> None:
    """180 MiB in each replica and each actor of emulated tiers, and in replicas whose actor holds the model."""
    imports = "import sys; import deployments.tiers.deployment, actors.engines.emulated.engines"
    script = f"{imports}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"]
