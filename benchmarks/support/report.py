"""What the bench says: sections of rows and goals, as a table, as JSON with its provenance, and as a plot."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.figures import Summary
from benchmarks.support.goals import Goal
from benchmarks.support.provenance import provenance


@dataclass(slots=True)
class Row:
    """One way of decoding, or one load. `speedup` is over the section's baseline."""

    label: str
    figures: dict[str, Summary]
    speedup: float | None = None


@dataclass(slots=True)
class Section:
    """One scenario. `setting`: what was measured, in words and numbers; `notes`: what a reader must know."""

    name: str
    setting: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def to_json(sections: list[Section]) -> str:
    """Everything, with provenance. NaN becomes null."""
    written = [
        asdict(section) | {"goals": [asdict(goal) | {"reached": goal.reached} for goal in section.goals]}
        for section in sections
    ]
    body = {"provenance": provenance(), "sections": written}
    return json.dumps(_finite(body), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("tokens/s", "tokens_per_s", 1, ".1f"),
    ("first token ms", "ttft_p50_s", 1e3, ".0f"),
    ("between tokens ms p50", "itl_p50_s", 1e3, ".1f"),
    ("p99", "itl_p99_s", 1e3, ".1f"),
    ("tokens/pass", "acceptance_length", 1, ".2f"),
    ("accepted", "acceptance_rate", 1, ".2f"),
    ("busy s/1000 tokens: target", "target_busy_s_per_1000", 1, ".1f"),
    ("draft", "draft_busy_s_per_1000", 1, ".1f"),
)
_LOST: tuple[tuple[str, str], ...] = (
    ("at the bound", "share_at_bound"),
    ("drafts not ready", "share_drafts_not_ready"),
    ("rest of passes", "share_rest"),
    ("held for drafts", "share_held_for_drafts"),
    ("between passes", "share_between_passes"),
    ("idle", "share_idle"),
)


def show(sections: list[Section], console: Console) -> None:
    """Print tables, goals and notes."""
    for section in sections:
        setting = ", ".join(f"{key} {value}" for key, value in section.setting.items())
        console.print(f"\n[bold]{section.name}[/bold]  {setting}")
        console.print(_table(section))
        if any("share_in_passes" in row.figures for row in section.rows):
            console.print(_lost_table(section))
        for goal in section.goals:
            console.print(f"  {goal}", style="green" if goal.reached else "red")
        for note in section.notes:
            console.print(f"  {note}")


def _table(section: Section) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("speed-up", justify="right")
    for title, *_ in _COLUMNS:
        table.add_column(title, justify="right")
    for row in section.rows:
        cells = [row.label, "" if row.speedup is None else f"{row.speedup:.2f}x"]
        for _, name, scale, form in _COLUMNS:
            figure = row.figures.get(name)
            cells.append("" if figure is None or math.isnan(figure.median) else _ranged(figure, scale, form, name))
        table.add_row(*cells)
    return table


def _ranged(figure: Summary, scale: float, form: str, name: str) -> str:
    text = format(figure.median * scale, form)
    if name != "tokens_per_s" or figure.least == figure.most:
        return text
    return f"{text} ({format(figure.least * scale, form)}-{format(figure.most * scale, form)})"


def _lost_table(section: Section) -> Table:
    table = Table(box=None, pad_edge=False, title="where the target's time went", title_justify="left")
    table.add_column("")
    shown = [(title, name) for title, name in _LOST if any(name in row.figures for row in section.rows)]
    for title, _ in shown:
        table.add_column(title, justify="right")
    for row in section.rows:
        values = [row.figures.get(name) for _, name in shown]
        table.add_row(row.label, *["" if value is None else f"{value.median:.1%}" for value in values])
    return table


def plot(sections: list[Section], path: Path) -> bool:
    """Bars of tokens per second with their range. False when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 2.4 * len(sections)), layout="constrained")
    axes = figure.subplots(len(sections), 1, squeeze=False)
    for axis, section in zip(axes[:, 0], sections, strict=True):
        speeds = [row.figures["tokens_per_s"] for row in section.rows]
        labels = [row.label for row in section.rows]
        spread = [[s.median - s.least for s in speeds], [s.most - s.median for s in speeds]]
        axis.barh(labels, [s.median for s in speeds], xerr=spread, color="tab:blue", ecolor="black")
        axis.invert_yaxis()
        axis.set_xlabel("tokens per second (median, range)")
        axis.set_title(section.name, fontsize=10)
    figure.savefig(path, dpi=120)
    return True
