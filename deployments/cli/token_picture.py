"""An answer as a picture that moves: tokens appear when their target pass ended, in the colour of where they came from.

A plain SVG with SMIL animation, which browsers and GitHub play without scripts. Pure: times are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from actors.messages import TokenOrigin
from deployments.cli.explain import STYLES

COLOURS: dict[TokenOrigin, str] = {
    "accepted": "#2da44e",
    "branch": "#8250df",
    "correction": "#cf222e",
    "bonus": "#0a7ea4",
    "plain": "#6e7781",
}
COLUMNS, ADVANCE, LINE, MARGIN = 84, 8.4, 22, 16
"""Characters per line; width of a character, height of a line and margin in pixels."""
REST_S = 3.0
"""How long the whole answer stays before it begins again."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one target pass committed. seconds: since the first pass ended."""

    seconds: float
    texts: Sequence[str]
    origins: Sequence[TokenOrigin]


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    column: int
    line: int
    origin: TokenOrigin
    seconds: float


def svg(arrivals: Sequence[Arrival], title: str) -> str:
    """The picture. Every token fades in at its time; after REST_S all of it starts again."""
    pieces = _laid_out(arrivals)
    lines = 1 + max((piece.line for piece in pieces), default=0)
    whole = REST_S + max((piece.seconds for piece in pieces), default=0.0)
    width, height = round(2 * MARGIN + COLUMNS * ADVANCE), 2 * MARGIN + (lines + 2) * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="monospace" font-size="14" role="img" aria-label="{escape(title, quote=True)}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="#f6f8fa"/>',
    ]
    for piece in pieces:
        parts.append(
            f'<text x="{MARGIN + piece.column * ADVANCE:.1f}" y="{MARGIN + (piece.line + 1) * LINE - 7}" '
            f'textLength="{len(piece.text) * ADVANCE:.1f}" xml:space="preserve" fill="{COLOURS[piece.origin]}">'
            f"{escape(piece.text)}{_appears(piece.seconds, whole)}</text>"
        )
    place = MARGIN
    for origin in STYLES:
        parts.append(
            f'<text x="{place}" y="{height - MARGIN}" font-size="12" fill="{COLOURS[origin]}">&#9632; {origin}</text>'
        )
        place += 120
    return "\n".join([*parts, "</svg>"]) + "\n"


def _appears(seconds: float, whole: float) -> str:
    """Invisible until `seconds` of a round of `whole`."""
    share = min(seconds / whole, 0.999)
    return (
        f'<animate attributeName="opacity" dur="{whole:.2f}s" repeatCount="indefinite" calcMode="discrete" '
        f'values="0;1" keyTimes="0;{share:.4f}"/>'
        if share > 0
        else ""
    )


def _laid_out(arrivals: Sequence[Arrival]) -> list[_Piece]:
    """Tokens on lines of COLUMNS characters; a line break in a token breaks the line."""
    pieces: list[_Piece] = []
    column = line = 0
    for arrival in arrivals:
        for text, origin in zip(arrival.texts, arrival.origins, strict=True):
            for number, part in enumerate(text.split("\n")):
                if number > 0 or column + len(part) > COLUMNS:
                    column, line = 0, line + 1
                shown = part.lstrip(" ") if column == 0 and number == 0 and line > 0 else part
                if shown:
                    pieces.append(_Piece(shown, column, line, origin, arrival.seconds))
                    column += len(shown)
    return pieces
