"""The reference of all commands as Markdown, read off the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer


def reference(app: typer.Typer) -> str:
    """A section for each command: what it does, how it is called, its arguments and options."""
    sections = ["# Command line reference", "", INTRODUCTION]
    for path, command in commands(typer.main.get_command(app), "outrider"):
        context = command.make_context(path, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        sections += ["", f"## {path}", "", _text(command.help), "", "```", f"{path} {usage}", "```"]
        rows = [row for parameter in command.get_params(context) if (row := _row(parameter, context))]
        if rows:
            sections += ["", "| argument or option | meaning |", "|---|---|", *rows]
    return "\n".join(sections) + "\n"


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with what one types to reach it, in order of the alphabet.

    command: typer's; a group of commands has `commands`.
    """
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in sorted(command.commands):
        yield from commands(command.commands[name], f"{path} {name}")


INTRODUCTION = (
    "`--json` where machines read. Exit codes: 0 done, 1 a request or the server failed, 2 the command or its input\n"
    "is wrong (one line says what), 130 interrupted."
)


def _row(parameter: Any, context: Any) -> str:
    record = parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return ""
    name, meaning = record
    return f"| `{name.strip()}` | {_text(meaning)} |"


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    from deployments.cli import main

    main.add_groups()
    print(reference(main.app), end="")
