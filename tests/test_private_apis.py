"""Private names of libraries stand in one adapter per library, and each has its line in docs/private-apis.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ADAPTERS = {
    "deployments/runtime/ray_internals.py",
    "actors/engines/vllm/internals.py",
    "actors/engines/transformers/torch_internals.py",
    "actors/engines/transformers/transformers_internals.py",
}
VARIABLES = {"deployments/runtime/serve_environment.py", "deployments/runtime/haproxy.py"}
"""Where variables of Ray Serve are named for the product."""
LIBRARIES = ("ray", "vllm", "transformers", "torch")
OWNERS = ("self", "cls", "super()")
"""Whoever reads a private attribute of these reads its own."""
PUBLIC = {"os._exit"}
PAGE = (ROOT / "docs" / "private-apis.md").read_text(encoding="utf-8")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_imports(tree: ast.AST) -> Iterator[str]:
    """Modules and names with a private part, of any library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if any(map(is_private, name.split("."))))


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines itself: objects of its own classes may be read by others of it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.add(target.attr)
    return found


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Private attributes of others, also those named by strings, and private keywords: their names."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            owner, second = node.args[0], node.args[1]
            name = str(second.value) if isinstance(second, ast.Constant) else ""
        else:
            if isinstance(node, ast.keyword) and node.arg is not None and is_private(node.arg):
                yield node.arg
            continue
        whole = f"{ast.unparse(owner)}.{name}"
        if is_private(name) and name not in own and ast.unparse(owner) not in OWNERS and whole not in PUBLIC:
            yield name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ray._private.state", ["ray._private.state"]),
        ("from ray.serve.context import _get_global_client", ["ray.serve.context._get_global_client"]),
        ("from ray.serve import status", []),
        ("self._x = cls._y + super()._z", []),
        ("config._attn_implementation", ["_attn_implementation"]),
        ("self._config._attn_implementation", ["_attn_implementation"]),
        ("os._exit(1)", []),
        ("handle.options(_by_reference=False, stream=True)", ["_by_reference"]),
        ("hasattr(torch.ops.mkldnn, '_linear_pointwise')", ["_linear_pointwise"]),
        ("getattr(self, '_seen', None), x.__dict__", []),
        ("class A:\n  _x: int\ndef f(a, b): return a._x + b._y", ["_y"]),
    ],
)
def test_what_counts_as_private(source: str, found: list[str]) -> None:
    tree = ast.parse(source)
    assert [*private_imports(tree), *private_uses(tree)] == found


def test_packages_and_benchmarks_use_no_private_names() -> None:
    found = {}
    for path in sources("actors", "cluster", "deployments", "benchmarks"):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix()
        if name not in ADAPTERS and (uses := [*private_imports(tree), *private_uses(tree)]):
            found[name] = uses
    assert not found, "each belongs into the adapter of its library, with a line in docs/private-apis.md"


def test_tests_import_no_private_modules_but_to_look_for_them() -> None:
    looking = {"tests/deployments/runtime/test_ray_internals.py"}
    found = {}
    for path in sources("tests"):
        name = path.relative_to(ROOT).as_posix()
        of_libraries = [
            one for one in private_imports(ast.parse(path.read_text(encoding="utf-8"))) if one.startswith(LIBRARIES)
        ]
        if name not in looking and of_libraries:
            found[name] = of_libraries
    assert not found


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_the_page_lists_every_private_name_of_an_adapter(adapter: str) -> None:
    tree = ast.parse((ROOT / adapter).read_text(encoding="utf-8"))
    uses = {use.rpartition(".")[2] for use in [*private_imports(tree), *private_uses(tree)]}
    assert uses, f"{adapter} adapts nothing"
    assert sorted(use for use in uses if use not in PAGE) == []
    assert adapter in PAGE


def variables(path: Path) -> Iterator[str]:
    """Names of variables of Ray's that a file mentions as a whole string."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        named = node.value if isinstance(node, ast.Constant) else None
        if isinstance(named, str) and re.fullmatch(r"(RAY|VLLM)_\w*[A-Za-z]", named):
            yield named


def test_the_page_lists_every_variable_that_is_set_or_read() -> None:
    files = sources("actors", "cluster", "deployments", "benchmarks", "tests")
    found = {name for path in files for name in variables(path)}
    assert sorted(name for name in found if f"`{name}`" not in PAGE) == []


def test_variables_of_ray_serve_stand_in_one_place() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources("actors", "cluster", "deployments")
        for name in variables(path)
        if name.startswith("RAY_SERVE_")
    }
    assert found == VARIABLES
