"""Options of benchmarks: one parser for all, so that each names itself as it is called."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks NAME`, whose help is the module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}".rstrip(),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """A number from `least` on, as the `type` of an option."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            raise argparse.ArgumentTypeError(f"wants a number of {least:g} or more, not {text!r}")
        return value

    return number


def share(text: str) -> float:
    """A number from 0 to 1, as the `type` of an option."""
    value = at_least(0.0, float)(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"wants a number from 0 to 1, not {text!r}")
    return value
