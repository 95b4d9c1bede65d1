"""The command line reference: the page is what the commands say of themselves."""

from __future__ import annotations

from pathlib import Path

from deployments.cli import main
from deployments.cli.reference import reference

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def test_the_page_is_what_the_commands_say() -> None:
    """After a change of commands: `python -m deployments.cli.reference > docs/cli.md`."""
    main.add_groups()
    assert PAGE.read_text(encoding="utf-8") == reference(main.app)


def test_every_command_says_what_it_does() -> None:
    main.add_groups()
    sections = reference(main.app).split("\n## ")[1:]
    assert {section.split("\n")[0] for section in sections} >= {"outrider serve", "outrider config check"}
    for section in sections:
        assert section.split("\n")[2].strip(), section
