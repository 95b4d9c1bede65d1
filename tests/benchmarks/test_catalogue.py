"""The door to the benchmarks: every name leads somewhere, and whoever calls one by name calls one that exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import listing, main
from benchmarks.catalogue import BENCHMARKS
from benchmarks.support.goals import Goal, exit_code, print_goals

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_name_leads_to_a_main_that_takes_arguments(name: str) -> None:
    """Read, not imported: some want vLLM."""
    tree = ast.parse((ROOT / "benchmarks" / f"{BENCHMARKS[name].module}.py").read_text())
    (entry,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert [argument.arg for argument in entry.args.args] == ["argv"]
    assert entry.returns is not None
    assert ast.unparse(entry.returns) == "int"


def test_every_module_has_a_name_and_no_door_of_its_own() -> None:
    modules = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    for own in ("__init__", "__main__", "catalogue"):
        del modules[own]
    # Scenarios of `pipeline`, which stand in files of their own.
    assert set(modules) - {one.module for one in BENCHMARKS.values()} == {"demo_pair", "pipeline_scenarios"}
    assert not [name for name, text in modules.items() if '__name__ == "__main__"' in text]


def test_the_list_has_a_line_for_each_and_needs_nothing_heavy() -> None:
    assert [line.split()[0] for line in listing().splitlines()[2:]] == list(BENCHMARKS)
    code = "import sys, benchmarks.__main__ as door; door.main([]); print({'torch', 'ray'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dors", "no benchmark 'dors'; did you mean doors?\n"),
        ("x", "no benchmark 'x'; `python -m benchmarks` lists them\n"),
    ],
)
def test_an_unknown_name_is_one_line_and_exit_code_2(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", [["one-sequence", "--repeats", "0"], ["batch", "--prompts", "many"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "wants a number of 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["Makefile", "README.md", "benchmarks/README.md"])
def test_commands_that_are_written_down_exist(file: str) -> None:
    called = re.findall(r"python -m benchmarks ([a-z][a-z-]*)", (ROOT / file).read_text())
    assert set(called) <= set(BENCHMARKS)


def test_the_readme_of_the_benchmarks_names_all() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    assert [name for name in BENCHMARKS if f"| `{name}` |" not in text] == []


def test_goals_are_printed_with_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    reached, missed = Goal("speed", 3.5, 3.4), Goal("pause, s", 2.5, 2.0, at_least=False)
    assert print_goals([reached, missed]) == 1
    assert capsys.readouterr().out == "reached: speed: 3.5 (goal >= 3.4)\nmissed: pause, s: 2.5 (goal <= 2)\n"
    assert exit_code([reached]) == 0
    assert exit_code([Goal("not measured", float("nan"), 1.0)]) == 1
