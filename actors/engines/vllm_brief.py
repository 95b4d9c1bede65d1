"""What vLLM's worker processes are told by the actor that they work for, and how they notice that it is gone.

Imports no vLLM.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from actors.settings import Rule


@dataclass(frozen=True, slots=True)
class Brief:
    """What a worker is told once, before the first request.

    address, secret, patience_s: of the exchange. tokenizer: JSON of the tokenizer, for grammars; None without them.
    owner: host and process id of the actor that the engine works for; workers on its host end when it is gone.
    """

    address: str | tuple[str, int]
    secret: bytes
    patience_s: float
    rule: Rule
    eos: tuple[int, ...]
    vocabulary: int
    tokenizer: str | None
    owner: tuple[str, int]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Brief:
        """From what came over vLLM's RPC, which turns tuples into lists."""
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
        return cls(**plain)


def end_with(owner: int, period_s: float = 1.0) -> None:
    """End this process when `owner` is gone: killed actors say no goodbye, and would leave workers on their GPUs."""
    while is_alive(owner):
        time.sleep(period_s)
    os._exit(1)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
