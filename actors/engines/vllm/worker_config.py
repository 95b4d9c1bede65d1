"""What vLLM's worker processes are told by the actor that they work for.

Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.settings import Rule


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told once, before the first request.

    address, secret, patience_s: of the exchange. tokenizer: JSON of the tokenizer, for grammars; None without them.
    """

    address: str | tuple[str, int]
    secret: bytes
    patience_s: float
    rule: Rule
    eos: tuple[int, ...]
    vocabulary: int
    tokenizer: str | None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> WorkerConfig:
        """From what came over vLLM's RPC, which turns tuples into lists."""
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
        return cls(**plain)
