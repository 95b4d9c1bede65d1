"""The door to all benchmarks: `python -m benchmarks NAME [options]`; without a name it lists them.

Exit codes: 0 measured, and every goal reached; 1 a goal missed; 2 the command is wrong.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from benchmarks.catalogue import BENCHMARKS


def listing() -> str:
    """One line per benchmark: its name, what it measures, its goal."""
    width = max(map(len, BENCHMARKS))
    lines = [
        f"{name:<{width}}  {one.measures}{f' (goal: {one.goal})' if one.goal else ''}"
        for name, one in BENCHMARKS.items()
    ]
    return "\n".join(["python -m benchmarks NAME [options]; NAME --help tells the options", "", *lines])


def main(arguments: Sequence[str]) -> int:
    """Measure what the first argument names; the rest is the benchmark's. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = arguments
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        near = difflib.get_close_matches(name, BENCHMARKS, 1)
        hint = f"; did you mean {near[0]}?" if near else "; `python -m benchmarks` lists them"
        print(f"no benchmark {name!r}{hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.{benchmark.module}")
    code: int = module.main([name, *rest] if benchmark.named else rest)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
