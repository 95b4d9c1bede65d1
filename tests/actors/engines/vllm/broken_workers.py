"""Workers of a vLLM whose internals have moved, for the start-up check to find."""

from __future__ import annotations

from typing import Any

from actors.engines.vllm import internals


class RenamedWorker(internals.MailboxWorker):  # type: ignore[misc]
    """The model runner decides somewhere else."""

    def take_brief(self, fields: dict[str, Any]) -> bool:
        runner = self.model_runner
        del runner.discard_request_mask
        return bool(super().take_brief(fields))


class ShiftedWorker(internals.MailboxWorker):  # type: ignore[misc]
    """Everything is where it was, but the rows of drafts come in another order."""

    def take_brief(self, fields: dict[str, Any]) -> bool:
        reached = super().take_brief(fields)
        sample = self.model_runner._sample

        def shifted(logits: Any, metadata: Any) -> Any:
            return sample(logits if metadata is None else logits.roll(1, 0), metadata)

        self.model_runner._sample = shifted
        return bool(reached)
