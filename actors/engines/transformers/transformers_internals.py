"""What transformers keeps to itself of attention: its name in a configuration, and the function of a model's file.

docs/private-apis.md says why; tests/actors/engines/transformers/test_library_internals.py looks for every name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def attention_name(config: Any) -> str:
    """The attention function that layers of this configuration look up at every call."""
    name: str = config._attn_implementation
    return name


@contextmanager
def attention(config: Any, name: str) -> Iterator[None]:
    """Layers of this configuration use the attention function registered as `name` meanwhile.

    `PreTrainedModel.set_attn_implementation` does this for whole models, and checks them; here a single layer is
    tried out.
    """
    chosen = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = chosen


def own_attention(module: nn.Module) -> Any:
    """The attention function of the file that defines `module`, used when a model is told to use its own; or None."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
