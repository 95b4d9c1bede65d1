"""Specifications of emulated hardware, and presets derived from public figures.

A preset `GPU[xN]-MODEL` (h100-70b, a10-1b, h100x8-405b) is arithmetic on the two tables below, nothing measured:

- a pass reads all weights once, in bf16, at `EFFICIENCY` of the memory bandwidth: that is the base time;
- tensor parallelism adds two all-reduces per layer of `ALL_REDUCE_S`, every pass adds `LAUNCH_S`;
- a token costs 2 x parameters floating-point operations at `UTILISATION` of the dense bf16 rate;
- the KV cache's reading is left out: it is small at the batch sizes and context lengths of interest here.

The constants are assumptions. Bandwidth, rate and memory are the vendors' data-sheet figures (dense, without
sparsity); parameters and layers are those of the Llama 3 family. Without `xN` the number of GPUs is the least power
of two that leaves a quarter of the memory for the KV cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from actors.engines.emulated.language import Agreement, Language
from actors.engines.emulated.timing import Fault
from actors.errors import ConfigError, ModelNotFoundError
from actors.settings import Settings

Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]

EFFICIENCY = 0.75
UTILISATION = 0.5
ALL_REDUCE_S = 12e-6
LAUNCH_S = 0.5e-3


class TargetSpec(Settings):
    """An emulated target: a pass takes pass_ms + token_ms · tokens + prompt_token_ms · prompt tokens."""

    pass_ms: Milliseconds = 25.0
    token_ms: Milliseconds = 0.0
    """Per token decided or verified: 1 + lookahead for each sequence in the pass."""
    prompt_token_ms: Milliseconds = 0.0
    language: Language = Language()
    faults: tuple[Fault, ...] = ()


class DraftSpec(Settings):
    """An emulated draft: a step takes step_ms + row_ms · rows + prompt_token_ms · tokens prefilled."""

    step_ms: Milliseconds = 3.0
    row_ms: Milliseconds = 0.0
    """Per tree node expanded in the step."""
    prompt_token_ms: Milliseconds = 0.0
    language: Language = Language()
    agreement: Agreement = Agreement()
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data-sheet figures of one GPU: bytes per second, bf16 operations per second, bytes."""

    bandwidth: float
    rate: float
    memory: float


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters and layers of a dense model."""

    parameters: float
    layers: int


GPUS = {
    "b200": Gpu(8.0e12, 2250e12, 180e9),
    "h200": Gpu(4.8e12, 989e12, 141e9),
    "h100": Gpu(3.35e12, 989e12, 80e9),
    "a100": Gpu(2.04e12, 312e12, 80e9),
    "l40s": Gpu(0.864e12, 362e12, 48e9),
    "a10": Gpu(0.6e12, 125e12, 24e9),
    "l4": Gpu(0.3e12, 121e12, 24e9),
}
MODELS = {
    "405b": Model(405.9e9, 126),
    "70b": Model(70.6e9, 80),
    "8b": Model(8.03e9, 32),
    "3b": Model(3.21e9, 28),
    "1b": Model(1.24e9, 16),
}
REFERENCE = "reference"
"""The round figures of the models' defaults: a pass of 25 ms, a draft step of 3 ms."""

_NAME = re.compile(r"(?P<gpu>[a-z]+\d+[a-z]*?)(?:x(?P<count>\d+))?-(?P<model>\d+b)")
_Spec = TypeVar("_Spec", TargetSpec, DraftSpec)


def preset_names() -> list[str]:
    """Names that need no `xN`, for messages and `--help`."""
    return [f"emulated:{REFERENCE}", *[f"emulated:{gpu}-{model}" for gpu in GPUS for model in MODELS]]


def preset_times(name: str) -> tuple[float, float]:
    """Milliseconds of a pass and of each token in it, for a preset `GPU[xN]-MODEL`. Raises ModelNotFoundError."""
    match = _NAME.fullmatch(name)
    if match is None or match["gpu"] not in GPUS or match["model"] not in MODELS:
        raise ModelNotFoundError(
            f"no emulated hardware 'emulated:{name}'; use emulated:{REFERENCE} or emulated:GPU[xN]-MODEL "
            f"with GPU one of {', '.join(GPUS)} and MODEL one of {', '.join(MODELS)}",
            "model",
        )
    gpu, model = GPUS[match["gpu"]], MODELS[match["model"]]
    weights = 2 * model.parameters
    count = int(match["count"] or 0)
    if not count:
        count = 1
        while weights > 0.75 * count * gpu.memory:
            count *= 2
    base = weights / (count * gpu.bandwidth * EFFICIENCY) + LAUNCH_S
    if count > 1:
        base += 2 * model.layers * ALL_REDUCE_S
    token = 2 * model.parameters / (count * gpu.rate * UTILISATION)
    return 1e3 * base, 1e3 * token


def target_spec(reference: str, overrides: dict[str, Any] | None = None) -> TargetSpec:
    """Specification of `emulated:PRESET` with the fields in `overrides` (engine_kwargs) replaced.

    Raises ModelNotFoundError for an unknown preset and ConfigError for overrides that are not valid.
    """
    name = reference.removeprefix("emulated:")
    fields: dict[str, Any] = {}
    if name != REFERENCE:
        base, token = preset_times(name)
        fields = {"pass_ms": base, "token_ms": token, "prompt_token_ms": token}
    return _validated(TargetSpec, fields | (overrides or {}), reference)


def draft_spec(reference: str, overrides: dict[str, Any] | None = None) -> DraftSpec:
    """Like `target_spec`, for a draft."""
    name = reference.removeprefix("emulated:")
    fields: dict[str, Any] = {}
    if name != REFERENCE:
        base, token = preset_times(name)
        fields = {"step_ms": base, "row_ms": token, "prompt_token_ms": token}
    return _validated(DraftSpec, fields | (overrides or {}), reference)


def _validated(kind: type[_Spec], fields: dict[str, Any], reference: str) -> _Spec:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = [f"engine_kwargs.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{reference}: " + "; ".join(problems), "engine_kwargs") from error
