"""The tiny checkpoint of vllm_stack, quantised: what compressed-tensors writes, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm_stack import checkpoint

_GROUP = 32
Parts = dict[str, Tensor]


def int8(name: str, weight: Tensor) -> Parts:
    """W8A8: a scale per row of the weight; activations are quantised as they come, a scale per token."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def int4(name: str, weight: Tensor) -> Parts:
    """W4A16: a scale per group of 32 inputs."""
    return _packed(name, weight, 4)


def packed_int8(name: str, weight: Tensor) -> Parts:
    """W8A16, likewise."""
    return _packed(name, weight, 8)


def _packed(name: str, weight: Tensor, bits: int) -> Parts:
    """As many weights as fit in a word of 32 bits, the first one lowest, counted from the least value on."""
    rows, columns = weight.shape
    most, each = 1 << (bits - 1), 32 // bits
    groups = weight.view(rows, columns // _GROUP, _GROUP)
    scale = groups.abs().amax(2, keepdim=True) / (most - 1)
    values = ((groups / scale).round().to(torch.int64) + most).view(rows, columns // each, each)
    words = (values << torch.arange(0, 32, bits)).sum(2)
    return {
        f"{name}.weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32),
        f"{name}.weight_scale": scale.squeeze(2),
        f"{name}.weight_shape": torch.tensor([rows, columns]),
    }


def fp8(name: str, weight: Tensor) -> Parts:
    """W8A8 of the float kind."""
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}


def _numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {
        "format": "int-quantized",
        "weights": _numbers(8, "int", "channel"),
        "input_activations": _numbers(8, "int", "token") | {"dynamic": True},
    },
    "int4": {"format": "pack-quantized", "weights": _numbers(4, "int", "group", group_size=_GROUP)},
    "packed int8": {"format": "pack-quantized", "weights": _numbers(8, "int", "group", group_size=_GROUP)},
    "fp8": {
        "format": "float-quantized",
        "weights": _numbers(8, "float", "channel"),
        "input_activations": _numbers(8, "float", "token") | {"dynamic": True},
    },
}
_QUANTISE = {"int8": int8, "int4": int4, "packed int8": packed_int8, "fp8": fp8}


def quantise(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Write the checkpoint with all linear layers but the head quantised, everything else in `dtype`."""
    checkpoint(folder)
    file = folder / "model.safetensors"
    parts: Parts = {}
    for name, weight in load_file(file).items():
        linear = name.endswith("_proj.weight")
        found = _QUANTISE[kind](name.removesuffix(".weight"), weight) if linear else {name: weight}
        parts |= {n: part.to(dtype) if part.dtype == torch.float32 else part for n, part in found.items()}
    save_file({n: part.contiguous() for n, part in parts.items()}, file, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    scheme = dict(SCHEMES[kind])
    described["dtype"] = str(dtype).removeprefix("torch.")
    described["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": scheme.pop("format"),
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
    }
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)
