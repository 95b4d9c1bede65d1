"""A draft that is asked only where the client's prediction has nothing to say.

Which of the two speaks depends on the prefix alone, as the probabilistic rules need it.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.engines.lookup.prompt_lookup import LookupSettings, PromptLookupDraft
from actors.engines.protocol import DraftModel, Expand, FeatureReader, ModelCard, Ranked, ReportsFacts
from actors.features import Features
from actors.messages import OpenSequence
from actors.settings import DraftSettings


class PredictedDraft:
    """Implements protocol.DraftModel: `draft`, and a lookup in the prediction of requests that bring one."""

    def __init__(self, draft: DraftModel, settings: DraftSettings) -> None:
        self._draft = draft
        self._lookup = PromptLookupDraft(settings, LookupSettings(prediction_alone=True))
        self._predicted: set[str] = set()

    def card(self) -> ModelCard:
        return self._draft.card()

    def facts(self) -> dict[str, float]:
        """The draft's own."""
        return self._draft.facts() if isinstance(self._draft, ReportsFacts) else {}

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence. Raises what the draft raises."""
        self._draft.open(opening)
        self._forget(opening.sequence)
        if opening.sampling.prediction:
            self._lookup.open(opening)
            self._predicted.add(opening.sequence)

    def close(self, sequence: str) -> None:
        """Give the slot back. Unknown sequences are ignored."""
        self._draft.close(sequence)
        self._forget(sequence)

    def _forget(self, sequence: str) -> None:
        self._lookup.close(sequence)
        self._predicted.discard(sequence)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed past the committed prefix."""
        self._draft.advance(sequence, tokens)
        if sequence in self._predicted:
            self._lookup.advance(sequence, tokens)

    def read_features(self, sequence: str, features: Features) -> None:
        """See protocol.FeatureReader; a draft that reads none drops them."""
        if isinstance(self._draft, FeatureReader):
            self._draft.read_features(sequence, features)

    def feature_counts(self) -> dict[str, float]:
        """See protocol.FeatureReader."""
        return self._draft.feature_counts() if isinstance(self._draft, FeatureReader) else {}

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """Chains of the prediction where it goes on from a prefix, and the draft's own answers elsewhere."""
        looked = self._lookup.expand([request for request in requests if request.sequence in self._predicted])
        found = [answer for answer in looked if answer.tokens]
        answered = {(answer.sequence, answer.path) for answer in found}
        rest = [request for request in requests if (request.sequence, request.path) not in answered]
        return found + (self._draft.expand(rest) if rest else [])
