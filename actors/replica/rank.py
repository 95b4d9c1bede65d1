"""The actor of a tensor-parallel rank other than the first: it joins a group, loads its share, and follows rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from actors.errors import EngineError

if TYPE_CHECKING:
    from actors.engines.transformers.causal_lm import CausalLM
    from actors.engines.transformers.ranks import RankGroup, Rendezvous


class RankActor:
    """A plain class; `ray.remote` is applied where it is placed.

    make_model: loads this rank's share, once the group has met.
    """

    def __init__(self, name: str, make_model: Callable[[RankGroup], CausalLM]) -> None:
        self._name = name
        self._make_model = make_model
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def join(self, rank: int, meeting: Rendezvous) -> None:
        """Begin to follow rank 0 of the group that meets there; returns at once."""
        self._thread = threading.Thread(target=self._follow, args=(rank, meeting), name=self._name, daemon=True)
        self._thread.start()

    def ping(self) -> str:
        """Health: raises EngineError when this rank has stopped to follow."""
        if self._failure is not None:
            raise EngineError(f"{self._name}: {self._failure}")
        if self._thread is not None and not self._thread.is_alive():
            raise EngineError(f"{self._name}: the group was disbanded")
        return self._name

    def _follow(self, rank: int, meeting: Rendezvous) -> None:
        from actors.engines.transformers.ranks import RankGroup, follow

        try:
            group = RankGroup.join(rank, meeting)
            follow(self._make_model(group), group)
        except BaseException as error:
            self._failure = error
