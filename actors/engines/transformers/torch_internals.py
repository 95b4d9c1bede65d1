"""Operations of torch that have no public name: oneDNN's linear layers with weights packed in advance.

docs/private-apis.md says why; tests/actors/engines/transformers/test_library_internals.py looks for every name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def has_packed_linear() -> bool:
    """Whether this build of torch has oneDNN, and these operations of it."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_packed_bfloat16() -> bool:
    """Whether they multiply bfloat16 on this processor."""
    return has_packed_linear() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """weight [out, in] in the layout that oneDNN reads fastest for inputs of about `rows` rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def packed_multiply() -> Any:
    """(x [rows, in], packed weight, bias or None, "none", [], "") -> [rows, out]."""
    return torch.ops.mkldnn._linear_pointwise.default
