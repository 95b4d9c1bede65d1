"""What the doors need from whatever generates: the orchestrator behind a Serve handle, or a stand-in in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from actors.messages import Delta, GenerationRequest
from actors.orchestrator import admission
from actors.settings import Rule


class Service(Protocol):
    """Generates answers. Closing the iterator of `generate` frees everything the request took."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]: ...

    async def status(self) -> dict[str, object]: ...

    async def ready(self) -> bool: ...


@runtime_checkable
class Answering(Protocol):
    """A Service that can be asked for whole answers at less cost than for their steps."""

    async def answer(self, request: GenerationRequest) -> Delta: ...


class Codec(admission.Codec, Protocol):
    """Between text and token ids, both ways; TextCodec and EmulatedCodec."""

    @property
    def vocabulary(self) -> int: ...

    def decode(self, tokens: Sequence[int], special: bool = False) -> str: ...

    def describe(self) -> dict[str, object]: ...

    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, as clients may know it. `created` is in Unix seconds, `context` in tokens."""

    model_id: str
    context: int
    rule: Rule = "coupled"
    created: int = 0
    version: str = "0"
    vocabulary: str = ""
    """Fingerprint of the target's vocabulary (cluster.models.references.vocabulary_fingerprint); empty where there
    is none."""
    ids: int = 2**31
    """Token ids are below this."""
    closed_schemas: bool = True
    """Whether objects of a client's JSON schema hold only the keys that it names, where it says nothing else."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    """What requests get that do not say it: of temperature, top_p, top_k, min_p and repetition_penalty."""

    @property
    def exact(self) -> bool:
        """Whether answers are distributed as the target's own."""
        return self.rule != "typical"

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: what else but the seed decides an answer."""
        return f"outrider-{self.version}-{self.rule}"
