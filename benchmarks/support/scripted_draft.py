"""A draft of known cost and quality for a real target: it knows the answers, and errs as often as it is told to.

Two ends of it share one script: `ScriptedDraft` is a remote draft, `ColocatedDraft` proposes inside vLLM, where each
pass waits for its steps. Steps take time and no arithmetic, as on a device that is not this machine's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.messages import OpenSequence, prefix_key

PLACE = "OUTRIDER_SCRIPT"
"""Environment variable that tells vLLM's processes where the script is."""


@dataclass
class Script:
    """answers: [prompt, answer] pairs. acceptance: share of draft tokens that are right. step_s: of one draft step."""

    acceptance: float
    step_s: float
    lookahead: int
    vocabulary: int
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def save(self, file: Path) -> None:
        """Write it down, and let processes that start from now on find it."""
        file.write_text(json.dumps(asdict(self)))
        os.environ[PLACE] = str(file)

    @classmethod
    def found(cls) -> Script:
        """The script that `save` wrote."""
        return cls(**json.loads(Path(os.environ[PLACE]).read_text()))

    def next(self, tokens: Sequence[int]) -> int | None:
        """What the draft says after `tokens`; None where it has left the answer, or that is over."""
        for prompt, answer in self.answers:
            n = len(prompt)
            place = len(tokens) - n
            if list(tokens[:n]) == prompt and place < len(answer) and list(tokens[n:]) == answer[:place]:
                chance = (prefix_key(tokens) >> 11) * 2.0**-53
                return answer[place] if chance < self.acceptance else (answer[place] + 1) % self.vocabulary
        return None


class ScriptedDraft:
    """Implements protocol.DraftModel."""

    def __init__(self, script: Script, slots: int, context: int) -> None:
        self._script, self._slots, self._context = script, slots, context
        self._tokens: dict[str, list[int]] = {}

    def card(self) -> ModelCard:
        return ModelCard("scripted", self._script.vocabulary, self._context, self._slots)

    def open(self, opening: OpenSequence) -> None:
        self._tokens[opening.sequence] = [*opening.prompt, *opening.committed]

    def close(self, sequence: str) -> None:
        self._tokens.pop(sequence, None)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self._tokens[sequence].extend(tokens)

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        time.sleep(self._script.step_s)
        answers = []
        for request in requests:
            token = self._script.next([*self._tokens[request.sequence], *request.path])
            known = (token,) if token is not None else ()
            answers.append(Ranked(request.sequence, request.path, known, (self._script.acceptance,) * len(known)))
        return answers


class ColocatedDraft:
    """vLLM's proposer of method `custom_class`: the same draft, whose steps the target waits for."""

    def __init__(self, vllm_config: Any) -> None:
        self._script = Script.found()

    def load_model(self, model: Any) -> None: ...

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """A chain of `lookahead` tokens for each request that decodes."""
        drafts: list[list[int]] = []
        for i, sampled in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[i, : num_tokens_no_spec[i]].tolist()
            chain: list[int] = []
            while sampled and len(chain) < self._script.lookahead:
                token = self._script.next([*tokens, *chain])
                chain.append(token if token is not None else 0)
            drafts.append(chain)
        if any(drafts):
            time.sleep(self._script.lookahead * self._script.step_s)
        return drafts
