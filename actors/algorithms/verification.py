"""One target pass: the logits of many blocks become what each sequence commits.

Knows nothing of engines or scheduling. Every block gets the token that plain decoding would have given at each
position (coupled rule, greedy) or a draw from the same distribution (rejection, block); see acceptance.py. The rows of
all blocks are read together (block_rows.py); what is told of one block alone (margins, log-probabilities, why there is
no token) is worked out here, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from actors.algorithms import acceptance, draft_tree, sampling
from actors.algorithms.block_rows import Grammar, choose, drafts_and_chances, draw, is_choice, rows_of_blocks
from actors.algorithms.gumbel_max import GumbelMax
from actors.algorithms.noise import NoiseSource, Stream, gumbel_of, row_key
from actors.algorithms.row_edits import EditedRow
from actors.algorithms.row_program import LogitsRow, RowProgram
from actors.algorithms.row_readings import LogProbabilities
from actors.algorithms.types import Block
from actors.errors import EngineError, InvalidSettingError, OutriderError
from actors.messages import Alternatives, VerificationResult
from actors.settings import SamplingSettings

T = TypeVar("T")
LARGEST_MARGIN = 1e9
"""Stands for infinity (there is no runner-up), which JSON cannot say."""


class _NoChoiceError(Exception):
    """No token can be chosen at a position."""

    def __init__(self, reason: OutriderError) -> None:
        super().__init__(reason)
        self.reason = reason


@torch.no_grad()
def verify_blocks(
    logits: Tensor,
    blocks: Sequence[Block],
    grammars: Sequence[Grammar | None] | None = None,
    *,
    at_once: bool | None = None,
) -> list[VerificationResult]:
    """Decide all blocks of a pass.

    logits: [N, V], any float type, where block i owns the next len(drafts) + 1 rows.
    grammars: one per block, or None where the answer is free.
    at_once: read all rows together, as suits a device; None asks the logits where they are.

    Raises ValueError if the rows do not add up. A block for which no token can be chosen gets a result with an
    `error` (InvalidSettingError if its settings leave nothing, EngineError if the model returned no numbers).
    """
    rows = sum(len(block.drafts) + 1 for block in blocks)
    if rows != logits.shape[0]:
        raise ValueError(f"{rows} rows of logits are needed for these blocks, not {logits.shape[0]}")
    verifier = _Pass(logits)
    starts = list(accumulate((len(block.drafts) + 1 for block in blocks), initial=0))
    outcomes = []
    at_once = logits.device.type != "cpu" if at_once is None else at_once
    program = RowProgram(logits, at_once=at_once)
    every = rows_of_blocks(blocks, grammars, verifier.size)
    ready = choose(program, every, at_once=at_once)
    drawn = draw(program, every) if at_once else {}
    for number, block in enumerate(blocks):
        choices = ready.get(number)
        outcome = _settled(block, choices) if choices is not None else None
        if outcome is None:
            grammar = grammars[number] if grammars is not None else None
            outcome = _Decider(verifier, block, starts[number], grammar, choices, drawn.get(number)).decide()
        outcomes.append(outcome)
    if any(block.sampling.logprobs is not None for block in blocks):
        _add_alternatives(program, outcomes, blocks, starts, at_once=at_once)
    return outcomes


@torch.no_grad()
def verify_alone(logits: Tensor, block: Block, grammar: Grammar | None = None) -> VerificationResult:
    """Decide one block [k + 1, V] row by row, each with scalar code: the reference for what is read from many rows.

    The same code decides in production where margins are asked for, where a token cannot be chosen (it tells why), and
    under the rules that need p.
    """
    result = _Decider(_Pass(logits), block, 0, grammar).decide()
    _add_alternatives(RowProgram(logits, at_once=False), [result], [block], [0], at_once=False)
    return result


def _add_alternatives(
    program: RowProgram,
    results: Sequence[VerificationResult],
    blocks: Sequence[Block],
    starts: Sequence[int],
    *,
    at_once: bool,
) -> None:
    """Log-probabilities by the model's own logits, where they are asked for."""
    told = [
        (result, block, _rows_of(result, block, start))
        for result, block, start in zip(results, blocks, starts, strict=False)
        if block.sampling.logprobs is not None
    ]
    tokens = {row: token for result, _, rows in told for row, token in zip(rows, result.tokens, strict=True)}
    most = max(block.sampling.logprobs or 0 for block in blocks)
    reading = LogProbabilities(tokens, most, at_once=at_once)
    as_it_is = EditedRow(SamplingSettings(temperature=0))
    read = program.read([LogitsRow(index, 0, as_it_is) for index in tokens], reading)
    found = {index: reading.parts(row) for index, row in zip(tokens, read, strict=True)}
    for result, block, rows in told:
        each = [found[row] for row in rows]
        result.alternatives = tuple(Alternatives(logprob, top[: block.sampling.logprobs]) for logprob, top in each)


def _rows_of(result: VerificationResult, block: Block, start: int) -> list[int]:
    """The row of logits from which each committed token came."""
    if not block.parents:
        return [start + i for i in range(len(result.tokens))]
    path = draft_tree.follow(block.drafts, block.parents, result.tokens[: result.accepted])
    return [start, *(start + node + 1 for node in path)][: len(result.tokens)]


class _Pass:
    """What the blocks of a pass share: the logits, and the noise buffers."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
        self.size = logits.shape[1]
        self.on_cpu = logits.device.type == "cpu"
        self._race: GumbelMax | None = None

    def row(self, n: int) -> Tensor:
        """The model's own logits [V], which may be a view."""
        return self._logits[n].to(self.dtype)

    @property
    def race(self) -> GumbelMax:
        """Made when the first row needs noise."""
        if self._race is None:
            self._race = GumbelMax(self.size, self.dtype, self._logits.device)
        return self._race


def _settled(block: Block, choices: Sequence[int]) -> VerificationResult | None:
    """What becomes of a block whose choices are made; None if a score is unusable."""
    path = draft_tree.walk(block.drafts, block.parents, choices)
    last = choices[path[-1] + 1 if path else 0]
    if last < 0:  # the walk ends at the first unusable score, or past a draft token that is none
        return None
    tokens = (*(block.drafts[node] for node in path), last)
    return VerificationResult(block.sequence, block.position, tokens, len(block.drafts), len(path))


class _Decider:
    """One block of a pass. Rows are worked on when a rule asks for them, in order, and are not known already.

    Places count tokens from the block's first position on. Of a tree, the rows are those of the nodes that the walk has
    come to: place i is the row of the i-th accepted node, and the history is the branch's own.

    ready: the target's own tokens by row, -1 where they are to be found out. drawn: what a probabilistic rule decided.
    """

    def __init__(
        self,
        verifier: _Pass,
        block: Block,
        start: int,
        grammar: Grammar | None = None,
        ready: list[int] | None = None,
        drawn: tuple[int, int] | None = None,
    ) -> None:
        self._pass = verifier
        self._block = block
        self._start = start
        self._settings = block.sampling
        # An id that the target does not have is a token of probability zero: the block ends before it.
        inside = [0 <= token < verifier.size for token in block.drafts]
        self._drafts = list(block.drafts[: inside.index(False)] if False in inside else block.drafts)
        self._rows: list[int] = list(range(len(self._drafts) + 1))
        if block.parents:
            self._drafts, self._rows = [], [0]
        self._adjusts = sampling.adjusts(block.sampling)
        self._history = sampling.History(block.prompt, block.output, block.sampling) if self._adjusts else None
        self._grammar = grammar
        self._ready = ready
        self._drawn = drawn
        self._adjusted: list[Tensor] = []
        self._choices: dict[int, int] = {}
        self._margins: dict[int, float] = {}
        self._p: dict[int, Tensor] = {}

    def decide(self) -> VerificationResult:
        tokens: list[int] = []
        error: OutriderError | None = None
        try:
            tau, last = self._apply_rule()
            tokens = [*self._drafts[:tau], last]
        except _NoChoiceError as problem:
            tau, error = self._agreed(), problem.reason
            tokens = self._drafts[:tau]
        block = self._block
        return VerificationResult(
            block.sequence,
            block.position,
            tuple(tokens),
            len(block.drafts),
            tau,
            margins=self._gaps(tokens),
            error=error,
            rejected=self._rejected(tokens[:tau]) if self._settings.margins and error is None else (),
        )

    def _rejected(self, accepted: Sequence[int]) -> tuple[int, ...]:
        return draft_tree.rejected(self._block.drafts, self._block.parents, accepted)

    def _apply_rule(self) -> tuple[int, int]:
        block, drafts = self._block, self._drafts
        if self._drawn is not None:
            return self._drawn
        if block.parents:
            tau = len(draft_tree.walk(block.drafts, block.parents, _Lazy(self._choice_at)))
            return tau, self.choice(tau)
        if is_choice(block):
            tau = acceptance.coupled(_Lazy(self.choice), drafts)
            return tau, self.choice(tau)
        if block.rule == "typical":
            tau = acceptance.typical(_Lazy(self.p), _Lazy(self.choice), drafts)
            return tau, self.choice(tau)
        q, eta = drafts_and_chances(block, drafts, self._pass.size)
        rule = acceptance.block if block.rule == "block" else acceptance.rejection
        decision = rule(_Lazy(self.p), q, drafts, eta)
        key = self._key(decision.tau, Stream.CORRECTION)
        return decision.tau, self._pass.race.draw(decision.y, key)

    def _choice_at(self, row: int) -> int:
        """The target's own token at a row of a tree, which is the next one of the walk."""
        if row:
            self._drafts.append(self._block.drafts[row - 1])
            self._rows.append(row)
        return self.choice(len(self._drafts))

    def choice(self, i: int) -> int:
        """The target's own token at place i: greedy, or with the shared noise."""
        if i not in self._choices:
            if self._ready is not None and self._ready[self._rows[i]] >= 0:
                self._choices[i] = self._ready[self._rows[i]]
            elif self._settings.greedy:
                self._choices[i] = self._greedily(self._row(i), i)
            else:
                self._choices[i] = self._with_noise(self._row(i), i)
        return self._choices[i]

    def p(self, i: int) -> Tensor:
        """p [V] at row i."""
        if i not in self._p:
            self._p[i] = sampling.probabilities(self._row(i), self._settings)
        return self._p[i]

    def _row(self, i: int) -> Tensor:
        """Adjusted logits [V] at row i, which hold a finite maximum."""
        while len(self._adjusted) <= i:
            n = len(self._adjusted)
            row = self._logits(n)
            if self._grammar is not None:
                row = row.masked_fill(~self._allowed(self._grammar, n).to(row.device), -torch.inf)
            if self._history is not None:
                if n:
                    self._history.append(self._drafts[n - 1])
                row = row.clone() if self._grammar is None else row
                sampling.adjust(row, self._settings, self._history, self._block.eos)
            self._adjusted.append(row)
            self._check(row, n)
        return self._adjusted[i]

    def _logits(self, i: int) -> Tensor:
        """The model's own logits [V] at place i."""
        return self._pass.row(self._start + self._rows[i])

    def _allowed(self, grammar: Grammar, n: int) -> Tensor:
        try:
            return grammar.mask(self._drafts[:n])
        except OutriderError as problem:
            raise _NoChoiceError(problem) from problem

    def _check(self, row: Tensor, n: int) -> None:
        best = sampling.largest(row)
        if best == -torch.inf:
            raw = float(self._logits(n).amax())
            if raw != -torch.inf:
                raise _NoChoiceError(self._unsatisfiable(n))
        if not -torch.inf < best < torch.inf:
            raise _NoChoiceError(EngineError("the model returned no usable scores (NaN or infinite)"))

    def _unsatisfiable(self, n: int) -> OutriderError:
        settings = self._settings
        suspects = {
            "response_format": self._grammar is not None,
            "allowed_token_ids": settings.allowed_token_ids is not None,
            "min_tokens": len(self._block.output) + n < settings.min_tokens,
            "bad_words": bool(settings.bad_words),
        }
        names = [name for name, used in suspects.items() if used] or ["logit_bias"]
        return InvalidSettingError(f"no token is left to choose from under {' and '.join(names)}", names[0])

    def _with_noise(self, row: Tensor, i: int) -> int:
        """The coupled choice at row i."""
        temperature, key = self._settings.temperature, self._key(i, Stream.SHARED)
        if not sampling.filters(self._settings):
            if self._settings.margins:
                self._set_margin(i, self._pass.race.gap(row, temperature, key) * temperature)
            return self._pass.race.winner(row, temperature, key)
        ids, scaled = sampling.kept(row, self._settings)
        chosen = int(ids[_most_perturbed(scaled, key, ids)])
        if self._settings.margins:
            scaled = row / temperature
            scores = scaled - NoiseSource(self._pass.size, row.dtype, device=row.device).negated([key])[0]
            self._set_margin(i, sampling.margin(scaled, scores, chosen, self._settings) * temperature)
        return chosen

    def _greedily(self, row: Tensor, i: int) -> int:
        if self._settings.margins:
            two = row.topk(min(2, row.numel())).values
            self._set_margin(i, float(two[0] - two[-1]) if two.numel() > 1 else LARGEST_MARGIN)
        # NumPy's argmax is vectorised, torch's on a CPU is not.
        return int(row.numpy().argmax()) if self._pass.on_cpu else int(row.argmax())

    def _set_margin(self, i: int, margin: float) -> None:
        self._margins[i] = min(margin, LARGEST_MARGIN)

    def _key(self, i: int, stream: Stream) -> int:
        return row_key(self._block.seed, self._block.position + i, stream)

    def _agreed(self) -> int:
        """Draft tokens that stood before the row for which no token can be chosen (coupled and greedy only)."""
        tau = 0
        while tau < len(self._drafts) and self._choices.get(tau) == self._drafts[tau]:
            tau += 1
        return tau

    def _gaps(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """The smallest change of a logit that makes another choice; only where tokens are choices, not draws."""
        if not (self._settings.margins and is_choice(self._block)):
            return ()
        return tuple(self._margins[i] for i in range(len(tokens)))


def _most_perturbed(scaled: Tensor, key: int, ids: Tensor) -> int:
    """argmax(scaled + g) [M], for the noise of some ids."""
    if ids.device.type == "cpu":
        return int((scaled.numpy() + gumbel_of(key, ids.numpy())).argmax())
    return int((scaled - NoiseSource(ids, scaled.dtype).negated([key])[0]).argmax())


class _Lazy(Generic[T]):
    """Items by position, made when asked for."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make

    def __getitem__(self, i: int) -> T:
        return self._make(i)
