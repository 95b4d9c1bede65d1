"""What an engine that schedules itself handed out, put together with what its passes reported of it.

What the engine hands out is what was committed. The reports say how it came about: which pass decided what, how much of
it was drafts. Tokens of several passes may come together, and a report may be lost; then the tokens go out without it,
and count as decoded plainly.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.messages import VerificationResult


def by_pass(output: VerificationResult, report: Callable[[int], VerificationResult | None]) -> list[VerificationResult]:
    """One result per pass that was reported; one for all tokens that follow a lost report.

    report: what was reported of the pass that decided a position. Its result is completed and handed on; a stop inside
    the block cut what the engine hands out, and so cuts it.
    """
    if output.error is not None or not output.tokens:
        return [output]
    results: list[VerificationResult] = []
    tokens, alternatives, position = output.tokens, output.alternatives, output.position
    while tokens:
        result = report(position)
        if result is None:  # tokens of several passes may come together: how many were drafts, nobody knows
            result = VerificationResult(output.sequence, position, tokens)
        result.cut(len(tokens))
        count = len(result.tokens)
        result.tokens, result.alternatives = tokens[:count], alternatives[:count]
        results.append(result)
        position += count
        tokens, alternatives = tokens[count:], alternatives[count:]
    results[-1].finish = output.finish
    return results
