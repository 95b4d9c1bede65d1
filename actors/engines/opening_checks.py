"""What every engine refuses when a sequence is opened, before it costs anything."""

from __future__ import annotations

from actors.algorithms.sampling import check_ids
from actors.errors import InvalidSettingError, PromptError
from actors.messages import OpenSequence


def check_opening(opening: OpenSequence, vocabulary: int) -> None:
    """Raises PromptError for a prompt that the model cannot read, InvalidSettingError for ids that it lacks."""
    if not opening.prompt:
        raise PromptError("the prompt is empty")
    if not all(0 <= token < vocabulary for token in (*opening.prompt, *opening.committed)):
        raise PromptError(f"the prompt holds a token id outside the model's vocabulary of {vocabulary}")
    culprit = check_ids(opening.sampling, vocabulary)
    if culprit is not None:
        raise InvalidSettingError(f"{culprit} must name token ids below {vocabulary}", culprit)
