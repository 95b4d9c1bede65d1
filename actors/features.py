"""Features of the target that travel with commits, as bytes. Advice: ids decide, and losing them costs acceptance.

One array per commit: row i belongs to absolute position `position` + i. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Features:
    """Fused hidden states of one sequence at successive committed positions.

    model: names what fused them (ModelCard.features); another draft has no use for them.
    data: rows of `width` numbers of type `dtype`, little-endian, end to end.
    """

    model: str
    position: int
    width: int
    data: bytes
    dtype: str = BFLOAT16

    def __reduce__(self) -> tuple[type[Features], tuple[object, ...]]:
        """See messages.Expansion."""
        return Features, (self.model, self.position, self.width, self.data, self.dtype)

    @property
    def count(self) -> int:
        """Positions, as far as they are whole."""
        return len(self.data) // (2 * self.width) if self.width > 0 else 0
