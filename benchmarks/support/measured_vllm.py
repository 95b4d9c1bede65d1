"""A vLLM target that tells what its exchange costs, and loses it on demand. For benches and drills."""

from __future__ import annotations

from actors.target.vllm_actor import VllmTargetActor


class MeasuredVllmTarget(VllmTargetActor):
    """The real actor, with two questions more."""

    def exchange_overhead(self) -> list[float]:
        """Seconds that the exchange took vLLM's first rank in recent passes, holds for drafts left out."""
        return list(self._exchange.overhead_s)

    def lose_mailbox(self) -> None:
        """Close the exchange, as if the mailbox had died; vLLM goes on without drafts."""
        if self._runtime is not None:
            self._runtime.lose_mailbox()
