"""The rows of a pass's blocks, read together: the target's own tokens, or the draws of the probabilistic rules.

Knows which rows of logits belong to a block and which tokens lead to each; the arithmetic is row_program.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.algorithms import acceptance, sampling
from actors.algorithms.noise import Stream, row_key, uniform
from actors.algorithms.row_draws import Residual, ResidualDraw, TokenMasses
from actors.algorithms.row_edits import BranchHistory, EditedRow
from actors.algorithms.row_program import NONE, LogitsRow, RowProgram
from actors.algorithms.row_readings import CoupledChoice
from actors.algorithms.types import Block
from actors.errors import OutriderError
from actors.messages import Support

FEW_BLOCKS = 16
"""Fewer blocks than this are filtered one by one on a CPU: some thirty calls for all of them together cost more."""


class Grammar(Protocol):
    """A constraint on the answer, standing at the block's first position."""

    def mask(self, path: Sequence[int], /) -> Tensor:
        """bool [V]: what may follow `path`, the block's first draft tokens. Raises OutriderError if it cannot tell."""


def is_choice(block: Block) -> bool:
    """Whether the block's tokens are the target's choices, not draws."""
    return block.sampling.greedy or block.rule == "coupled"


class BlockRows:
    """The rows of one block: row 0 follows the committed prefix, row i + 1 the draft token i and those before it on its
    path or, in a tree of drafts, its branch.

    start: index of row 0 in the logits of the pass, of which each has `size` columns.
    """

    def __init__(self, block: Block, start: int, grammar: Grammar | None, size: int) -> None:
        self.block = block
        self._start, self._grammar = start, grammar
        settings = block.sampling
        self._history = sampling.History(block.prompt, block.output, settings) if sampling.adjusts(settings) else None
        self._unchanged = EditedRow(settings) if self._history is None and grammar is None else None
        self._parents = block.parents or range(-1, len(block.drafts) - 1)
        self._paths: list[tuple[int, ...] | None] = [()]
        for i, (token, parent) in enumerate(zip(block.drafts, self._parents, strict=True)):
            before = self._paths[parent + 1] if -1 <= parent < i else None
            self._paths.append((*before, token) if before is not None and 0 <= token < size else None)

    @property
    def is_plain(self) -> bool:
        """Whether the best token of each row as it stands is all that is asked for."""
        return self.block.sampling.greedy and self._unchanged is not None

    @property
    def is_filtered(self) -> bool:
        """Whether min_p, top_k or top_p leave tokens out of a draw."""
        return not self.block.sampling.greedy and sampling.filters(self.block.sampling)

    def possible(self) -> list[int]:
        """The rows that can matter: none past a draft token that the target does not have."""
        return [row for row, path in enumerate(self._paths) if path is not None]

    def child(self, row: int, token: int) -> int | None:
        """The row that follows `row` by `token`, if that is a draft; of duplicate siblings the first."""
        for i in range(row, len(self._parents)):
            if self._parents[i] == row - 1 and self.block.drafts[i] == token != NONE:
                return i + 1
        return None

    def ask(self, row: int, stream: Stream = Stream.SHARED) -> LogitsRow | None:
        """The row with its history and noise; None if it cannot matter, or the grammar cannot tell what may follow."""
        block, path = self.block, self._paths[row]
        if path is None:
            return None
        key = 0 if block.sampling.greedy else row_key(block.seed, block.position + len(path), stream)
        if self._unchanged is not None:
            return LogitsRow(self._start + row, key, self._unchanged)
        mask: Tensor | None = None
        if self._grammar is not None:
            try:
                mask = self._grammar.mask(path)
            except OutriderError:  # told when the block is decided, should it come to this row
                return None
        history = BranchHistory(self._history, path) if self._history is not None else None
        return LogitsRow(self._start + row, key, EditedRow(block.sampling, history, mask, block.eos))


def rows_of_blocks(
    blocks: Sequence[Block], grammars: Sequence[Grammar | None] | None, size: int
) -> dict[int, BlockRows]:
    """By number of the block. Left out are those that are decided alone: where margins are asked for."""
    found: dict[int, BlockRows] = {}
    start = 0
    for number, block in enumerate(blocks):
        if not block.sampling.margins:
            found[number] = BlockRows(block, start, grammars[number] if grammars is not None else None, size)
        start += len(block.drafts) + 1
    return found


def choose(program: RowProgram, every: dict[int, BlockRows], *, at_once: bool) -> dict[int, list[int]]:
    """The target's own tokens at the rows of all blocks for which the rule is these tokens, by block.

    On a device all rows are read at once: a launch and a copy cost more than a row's arithmetic. On a CPU arithmetic is
    what costs, so the rows are read that the walks come to, one of each block at a time, and only where that is cheaper
    than a block by itself: the best token of rows as they are, and filters. A row that was not read, or has no token,
    has -1.
    """
    blocks = {number: rows for number, rows in every.items() if is_choice(rows.block)}
    if not at_once:
        many = len(blocks) >= FEW_BLOCKS
        blocks = {n: rows for n, rows in blocks.items() if rows.is_plain or (many and rows.is_filtered)}
    ready = {number: [NONE] * (len(rows.block.drafts) + 1) for number, rows in blocks.items()}
    reading = CoupledChoice(program.size, program.dtype, program.device, at_once=at_once)
    asked = [
        (number, row)
        for number, rows in blocks.items()
        for row in (rows.possible() if at_once or rows.is_plain else [0])
    ]
    while asked:
        rows = {(number, row): blocks[number].ask(row) for number, row in asked}
        known = {place: row for place, row in rows.items() if row is not None}
        found = program.read(list(known.values()), reading)[:, 0].tolist()
        for (number, row), token in zip(known, found, strict=True):
            ready[number][row] = int(token)
        following = ((number, blocks[number].child(row, ready[number][row])) for number, row in known)
        asked = [(n, row) for n, row in following if row is not None and ready[n][row] == NONE and not at_once]
    return ready


class _Unreadable(Exception):  # no error: the block is decided by itself
    """A row that a rule comes to has no finite score."""


class _Masses:
    """What was read of a block's rows (acceptance.Masses)."""

    def __init__(self, rows: Sequence[dict[int, float] | None]) -> None:
        self._rows = rows

    def at(self, i: int, tokens: Sequence[int], /) -> Sequence[float]:
        row = self._rows[i]
        if row is None:
            raise _Unreadable
        return [row[token] for token in tokens]


def drafts_and_chances(block: Block, drafts: Sequence[int], size: int) -> tuple[list[Support | None], list[float]]:
    """q at each of `drafts` (None is one-hot), and the uniform numbers eta of a probabilistic rule."""
    supports = [*block.supports, *[None] * len(drafts)][: len(drafts)]
    q = [acceptance.usable_support(s, x, size) for s, x in zip(supports, drafts, strict=True)]
    # Block verification looks at numbers past tau, so they belong to this pass: its first position is their salt.
    salt = block.position if block.rule == "block" else 0
    return q, [uniform(block.seed, block.position + i, Stream.ACCEPTANCE, salt) for i in range(len(drafts))]


def draw(program: RowProgram, every: dict[int, BlockRows]) -> dict[int, tuple[int, int]]:
    """(tau, token) of the blocks under rejection and block verification.

    Blocks with a row that cannot be read are left out: they are decided alone, which tells why.
    """
    blocks = {n: rows for n, rows in every.items() if not is_choice(rows.block) and rows.block.rule != "typical"}
    q, eta, asked = {}, {}, {}
    named: dict[int, Sequence[int]] = {}
    for number, rows in blocks.items():
        drafts = rows.block.drafts[: rows.possible()[-1]]
        q[number], eta[number] = drafts_and_chances(rows.block, drafts, program.size)
        for i, (support, token) in enumerate(zip(q[number], drafts, strict=True)):
            row = rows.ask(i)
            if row is not None:
                asked[number, i] = row
                named[row.index] = support.tokens if support is not None else (token,)
    read = program.read(list(asked.values()), TokenMasses(named))
    masses = {
        place: dict(zip(named[row.index], found.tolist(), strict=False))
        for (place, row), found in zip(asked.items(), read, strict=True)
        if found[0] != NONE
    }
    stops: dict[int, acceptance.Stop] = {}
    corrections: dict[int, LogitsRow] = {}
    residuals: dict[int, Residual] = {}
    for number, rows in blocks.items():
        x = rows.block.drafts[: len(q[number])]
        p = _Masses([masses.get((number, i)) for i in range(len(x))])
        rule = acceptance.block_stop if rows.block.rule == "block" else acceptance.rejection_stop
        try:
            stop = rule(p, q[number], x, eta[number])
        except _Unreadable:
            continue
        row = rows.ask(stop.tau, Stream.CORRECTION)
        if row is not None:
            stops[number], corrections[number] = stop, row
            residuals[row.index] = _residual(stop, q[number], x)
    tokens = program.read(list(corrections.values()), ResidualDraw(residuals))[:, 0].tolist()
    return {n: (stops[n].tau, int(token)) for n, token in zip(corrections, tokens, strict=True) if token != NONE}


def _residual(stop: acceptance.Stop, q: Sequence[Support | None], x: Sequence[int]) -> Residual:
    if stop.weight is None:
        return Residual()
    support, token = q[stop.tau], x[stop.tau]
    if support is None:
        return Residual((token,), (1.0,), token, stop.weight)
    return Residual(support.tokens, support.probabilities, token, stop.weight)
