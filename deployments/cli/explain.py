"""Shows where each token of an answer came from: in colour on a terminal, with marks elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from actors.messages import Delta, TokenOrigin, Usage

STYLES: dict[TokenOrigin, tuple[str, str, str]] = {
    "accepted": ("green", "", "guessed by the draft, accepted by the target"),
    "branch": ("magenta", "~", "an alternative of the draft's, verified beside its first guess, that came true"),
    "correction": ("red", "×", "the target's own, where the draft was wrong"),
    "bonus": ("cyan", "+", "the target's own, after a whole block was accepted"),
    "plain": ("default", "·", "the target's own, no draft token was there"),
}
"""Per origin: colour, mark where there are no colours, meaning."""


class Explainer:
    """Prints deltas as they come. Without `colours` every token but accepted ones is preceded by a mark."""

    def __init__(self, console: Console, explain: bool = True) -> None:
        self._console = console
        self._explain = explain
        self._colours = console.color_system is not None

    def show(self, delta: Delta) -> None:
        """Print one step of an answer."""
        if not self._explain:
            self._write(Text(delta.text))
            return
        for text, origin in zip(delta.texts, delta.origins, strict=False):
            style, mark, _ = STYLES[origin]
            self._write(Text(text, style) if self._colours else Text(mark + text if text else text))

    def legend(self) -> None:
        """Say what the colours, or the marks, mean."""
        for origin, (style, mark, meaning) in STYLES.items():
            shown = Text(f"  {origin:<10} ", style) if self._colours else Text(f"  {mark or ' '} {origin:<10} ")
            self._console.print(shown.append(Text(meaning, "default")))

    def summary(self, usage: Usage) -> None:
        """Say what the answer took."""
        self._console.print(Text(describe(usage), "dim"))

    def _write(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True, highlight=False)


def describe(usage: Usage) -> str:
    """Tokens, passes and acceptance, in one line."""
    parts = [f"{usage.completion_tokens} tokens in {usage.passes} target passes"]
    if usage.passes:
        parts[0] += f" ({usage.completion_tokens / usage.passes:.2f} per pass)"
    if usage.proposed_tokens:
        rate = usage.accepted_tokens / usage.proposed_tokens
        parts.append(f"{usage.accepted_tokens} of {usage.proposed_tokens} draft tokens accepted ({rate:.0%})")
    else:
        parts.append("no draft tokens were verified")
    return "; ".join(parts)


def status_rows(status: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Tier, replica, its load and what its controllers do, for `outrider status`."""
    rows = []
    for tier in ("target", "draft"):
        told = status.get(tier, {})
        for name, replica in told.get("replicas", {}).items():
            leaving = ", to go when they have ended" if replica.get("draining") else ""
            rows.append((tier, _short(name), _load(replica) + leaving, _controllers(replica)))
        for name, reason in told.get("refused", {}).items():
            rows.append((tier, _short(name), f"not used: {reason}", ""))
        if not told.get("replicas"):
            rows.append((tier, "-", "no replica", ""))
        rows += [(tier, "-", line, "") for line in _trouble(told)]
    return rows


def _short(name: str) -> str:
    """A replica's name without application and tier, which the table says already; --json has it whole."""
    return name.rpartition(":")[2]


def _load(replica: dict[str, Any]) -> str:
    sequences = replica.get("sequences", 0)
    parts = [f"{sequences} sequence{'' if sequences == 1 else 's'}"]
    if "running" in replica:
        parts.append(f"{replica['running']:.0f} of {replica['slots']:.0f} slots, {replica['waiting']:.0f} waiting")
        parts.append(f"cache {replica['kv_share']:.0%}")
    elif "sessions" in replica:
        parts.append(f"{replica['sessions']:.0f} of {replica['slots']:.0f} slots")
    return ", ".join(parts)


def _controllers(replica: dict[str, Any]) -> str:
    """The running means that the replica told; nothing before the first pass."""
    forms = {
        "lookahead": "lookahead {:.1f}",
        "acceptance_rate": "{:.0%} accepted",
        "acceptance_length": "{:.2f} tokens per pass",
        "held": "{:.0%} of the time held for drafts",
        "drafted": "{:.1f} draft tokens per step",
    }
    parts = [form.format(replica[name]) for name, form in forms.items() if name in replica]
    if "step_s" in replica:
        parts.append(f"steps of {1e3 * replica['step_s']:.1f} ms")
    return ", ".join(parts) if "acceptance_length" in replica or "step_s" in replica else ""


def _trouble(told: dict[str, Any]) -> list[str]:
    """What a tier waits for, in words for an operator; nothing when it is as it should be."""
    serve = told.get("serve", {})
    states: dict[str, int] = serve.get("states", {})
    lines = []
    if starting := states.get("STARTING", 0):
        lines.append(f"{starting} starting" + (f"; {serve['obstacle']}" if serve.get("obstacle") else ""))
    without = states.get("RUNNING", 0) - len(told.get("replicas", {})) - len(told.get("refused", {}))
    if without > 0:
        lines.append(f"{without} running without a model: it starts, or is placed again after a loss (see the log)")
    if serve.get("status") in ("UNHEALTHY", "DEPLOY_FAILED"):
        message = next(iter(str(serve.get("message", "")).strip().splitlines()), "")
        lines.append(f"{serve['status']}: {message}")
    return lines
