"""What the documents say can be followed: links lead somewhere, configurations are valid, commands exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from cluster.config.deployment import load_config

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("k8s/*.md"), *ROOT.glob("benchmarks/README.md")]
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_configurations_are_valid(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "yaml" and "applications:" in block and "import_path" in block:
            load_config(yaml.safe_load(block)["applications"][0]["args"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    said = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert said <= targets


PLACE = re.compile(r"`([\w/]+\.py)(?:::([\w.]+))?`")


def defined(file: Path) -> set[str]:
    """Names of classes, functions and methods of a file, methods with their class."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
            names.update(f"{node.name}.{child.name}" for child in inner)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_functions_named_are_there(page: Path) -> None:
    for file, name in PLACE.findall(page.read_text(encoding="utf-8")):
        if "/" in file:
            assert (ROOT / file).exists(), f"{file} is not there"
            assert not name or name in defined(ROOT / file), f"{file} has no {name}"
