"""What crosses an actor boundary. Plain data: no torch, no Ray, no behaviour beyond naming a prefix.

Everything is batched: one message carries all sequences of a pair of actors, so that the work per target pass is
O(1) messages per pair. Token ids, positions and probabilities travel; a full-vocabulary row
never does.

A prefix is named by its *key*, a 64-bit rolling hash of its token ids. A draft token is therefore identified by
content (the key of its parent and its own id), not by a round: what is stale simply has a key that nothing asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from actors.features import Features
from actors.settings import SamplingSettings

FinishReason = Literal["stop", "length", "error"]
TokenOrigin = Literal["accepted", "branch", "correction", "bonus", "plain"]
"""branch: an accepted draft token, too, but not the most likely one of those that the pass verified in its place."""
DRAFTED: frozenset[TokenOrigin] = frozenset({"accepted", "branch"})
"""Origins of accepted draft tokens."""

_MASK = (1 << 64) - 1
EMPTY_PREFIX = 0x9E3779B97F4A7C15


def extend_key(key: int, token: int) -> int:
    """Key of the prefix `key` followed by `token` (one round of the splitmix64 finaliser, so order matters)."""
    z = (key ^ (token + 1)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 30)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def prefix_key(tokens: Iterable[int], key: int = EMPTY_PREFIX) -> int:
    """Key of a whole prefix, or of `tokens` past the prefix named `key`."""
    for token in tokens:
        key = extend_key(key, token)
    return key


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Start, or resume, a sequence on a target or a draft replica.

    `committed` is what an earlier replica already committed past the prompt; it is prefilled, never decided again.
    `seed` is resolved: the ingress draws one where the client sent none. `tenant` owns the text: a draft that remembers
    answers shows them to no other one.
    """

    sequence: str
    prompt: tuple[int, ...]
    sampling: SamplingSettings
    seed: int
    committed: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Support:
    """A draft's distribution at one node: the kept token ids and their probabilities, which sum to one.

    It is the very q that the draft token was drawn from (renormalised *before* drafting). One id with probability
    one is a deterministic draft.
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Expansion:
    """The draft's answer at one node of a sequence's outcome tree: what may follow the prefix `parent`.

    position: absolute position (prompt included) that the children would take.
    tokens: children, the sampled one first, then alternatives that a pass may verify beside it. Where q is sent there
        are none: such rules follow the sampled child. What follows a child comes as an expansion of its own.
    confidences: calibrated probability, per child, that the target commits it given that the parent is committed.
    support: q at this node, for the probabilistic acceptance rules only.
    """

    parent: int
    position: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    support: Support | None = None

    def __reduce__(self) -> tuple[type[Expansion], tuple[object, ...]]:
        """Messages hold many of these, and a frozen dataclass with slots is slow to pickle by itself."""
        return Expansion, (self.parent, self.position, self.tokens, self.confidences, self.support)


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """Proposals of one draft step, for many sequences: draft -> orchestrator -> target.

    `behind` names sequences that the draft cannot follow any more, with the position from which it needs the
    committed tokens again (a commit was lost); the orchestrator answers with a `CommitUpdate`. `unknown` names
    sequences that the draft does not hold (it was restarted); the orchestrator opens them again. `refused` names
    those that it has no room for; the orchestrator looks for another draft.
    """

    source: str
    expansions: dict[str, list[Expansion]]
    behind: dict[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    step_seconds: float = 0.0
    rows: int = 0
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class CommitUpdate:
    """Committed tokens of one sequence from absolute `position` on: orchestrator -> draft.

    declined: see VerificationResult. features: the target's, of committed positions; advice that may be missing.
    """

    sequence: str
    position: int
    tokens: tuple[int, ...]
    declined: bool = False
    features: Features | None = None

    def __reduce__(self) -> tuple[type[CommitUpdate], tuple[object, ...]]:
        """See Expansion."""
        always = (self.sequence, self.position, self.tokens, self.declined)
        return CommitUpdate, always if self.features is None else (*always, self.features)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget these sequences and give back what they hold; ids that are not known are ignored."""

    sequences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The target's own view of one committed token: its log-probability and the best alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class VerificationResult:
    """What one target pass decided for one sequence. The same object goes from the engine to the session.

    tokens: committed by this pass, from absolute `position` on; empty while a prompt is still being prefilled.
    proposed: draft tokens verified; of a tree those on the path that came true and on the most likely path from there.
    accepted: how many of them were draft tokens; the one after is a correction (accepted < proposed), a bonus
        (accepted == proposed > 0) or plain (nothing was proposed). A stop inside the block cuts `tokens` short.
    branches: places of the accepted tokens that were alternatives to a more likely one in the same pass.
    alternatives: the target's view of each token, where log-probabilities were asked for.
    margins: distance between the two best scores at each token, when asked for (to detect near-ties).
    rejected: the draft tokens from the first one that was not accepted on, told together with margins (to show them).
    declined: drafts were at hand and the lookahead controller found none worth verifying, or there were none and it has
        not found any worth it for a while; so the draft should do no more than keep up.
    starved: the pass could have verified drafts, and found none.
    error: no token can be chosen after `tokens` (they may be empty): the sequence ends here, the others go on.
    features: of positions that are committed now, for a draft that reads the target's hidden states.

    An engine fills in the facts of its pass, the scheduler `finish`, the proposal broker `declined`, `starved` and, of
    a tree, what `proposed` and `branches` are on its path; a result that was sent is not changed any more.
    """

    sequence: str
    position: int
    tokens: tuple[int, ...]
    proposed: int = 0
    accepted: int = 0
    finish: FinishReason | None = None
    alternatives: tuple[Alternatives, ...] = ()
    margins: tuple[float, ...] = ()
    declined: bool = False
    starved: bool = False
    error: Exception | None = None
    branches: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()
    features: Features | None = None

    def __reduce__(self) -> tuple[type[VerificationResult], tuple[object, ...]]:
        """See Expansion."""
        always = (self.sequence, self.position, self.tokens, self.proposed, self.accepted)
        rest = (
            self.finish, self.alternatives, self.margins, self.declined, self.starved, self.error, self.branches,
            self.rejected, self.features,
        )  # fmt: skip
        return VerificationResult, always if rest == _NOTHING_MORE else always + rest

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, and what is said of them."""
        if length < len(self.tokens):
            self.tokens = self.tokens[:length]
            self.accepted = min(self.accepted, length)
            self.alternatives, self.margins = self.alternatives[:length], self.margins[:length]
            self.branches = tuple(place for place in self.branches if place < length)
            self.rejected = ()

    def origins(self) -> list[TokenOrigin]:
        """Where each committed token came from, in order."""
        last: TokenOrigin = "plain"
        if self.proposed:
            last = "bonus" if self.accepted == self.proposed else "correction"
        origins: list[TokenOrigin] = ["accepted" if i < self.accepted else last for i in range(len(self.tokens))]
        for place in self.branches:
            origins[place] = "branch"
        return origins


_NOTHING_MORE = (None, (), (), False, False, None, (), (), None)
"""What most results say last."""


@dataclass(frozen=True, slots=True)
class VerificationBatch:
    """Everything one target pass decided for one orchestrator, and what the pass cost (seconds)."""

    source: str
    number: int
    results: list[VerificationResult]
    pass_seconds: float = 0.0
    tokens_in_pass: int = 0
    ended_at: float = 0.0


TargetMessage = OpenSequence | ProposalBatch | Cancel
"""What an orchestrator sends to a target, in the order in which it is to be taken."""

DraftMessage = OpenSequence | CommitUpdate | Cancel
"""What an orchestrator sends to a draft, in the order in which it is to be taken."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A replica's answer to a keepalive: does it hold work, how many passes or steps has it done, is it to go."""

    busy: bool
    progress: int
    draining: bool = False
    """It shall get no new sequences; what it has may finish, or move."""
    facts: dict[str, float] = field(default_factory=dict)
    """Its load and what its controllers do, for people who ask (`outrider status`); nothing is decided by them."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One choice to generate. Exactly one of `text`, `tokens` and `messages` is the prompt.

    id: names the sequence everywhere, also when another replica takes over: never reused.
    committed: tokens that an earlier orchestrator already delivered; generation goes on after them.
    elapsed_s: seconds of its time limit that went by at earlier orchestrators.
    owner: whose request it is, as far as the ingress knows (the name of its API key; empty without keys). A recorder of
        answers reads it, and a draft that remembers answers (OpenSequence.tenant).
    """

    id: str
    sampling: SamplingSettings
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: tuple[dict[str, object], ...] | None = None
    tools: tuple[dict[str, object], ...] | None = None
    committed: tuple[int, ...] = ()
    timeout_s: float | None = None
    elapsed_s: float = 0.0
    priority: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a finished request took. `passes` counts the target passes that committed something."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    passes: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """A step of an answer: orchestrator -> ingress. Several committed tokens, with their text.

    texts: per token, the text it completed (empty while a character is split over tokens); they join to the answer.
    rejected: per token, where margins were asked for: the draft tokens in whose place it is.
    usage: in the last delta only, together with `finish`.
    stop: the stop string or token id that ended the answer, if one did.
    """

    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    alternatives: tuple[Alternatives, ...] = ()
    margins: tuple[float, ...] = ()
    finish: FinishReason | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    rejected: tuple[tuple[int, ...], ...] = ()

    @property
    def text(self) -> str:
        """The text of this step."""
        return "".join(self.texts)

    def then(self, later: Delta) -> Delta:
        """This step and the one after it, as one."""
        return joined([self, later])


def joined(steps: Sequence[Delta]) -> Delta:
    """Steps of one answer, in order, as one."""
    tokens = tuple(chain.from_iterable(step.tokens for step in steps))
    texts = tuple(chain.from_iterable(step.texts for step in steps))
    if len(texts) > len(tokens) > 0:  # text that came without a token of its own belongs to the last one
        texts = (*texts[: len(tokens) - 1], "".join(texts[len(tokens) - 1 :]))
    last = steps[-1] if steps else Delta()
    return Delta(
        tokens=tokens,
        texts=texts,
        origins=tuple(chain.from_iterable(step.origins for step in steps)),
        alternatives=tuple(chain.from_iterable(step.alternatives for step in steps)),
        margins=tuple(chain.from_iterable(step.margins for step in steps)),
        finish=last.finish,
        stop=last.stop,
        usage=last.usage,
        rejected=tuple(chain.from_iterable(step.rejected for step in steps)),
    )
