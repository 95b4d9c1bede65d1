"""What vLLM is asked to build: a plan of ours, as the arguments of its AsyncEngineArgs.

vLLM is imported when arguments are made, never before.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from actors.engines.vllm.owner import OwnerWatch
from actors.errors import ConfigError

TRIED = (0, 32)
"""The minor version of vLLM whose internals were tried."""
_CPU_BLOCK = 128
"""Positions in a block of vLLM's cache on a CPU."""
INTERNALS = "actors.engines.vllm.internals"
_OURS = {
    "model": "use target.model",
    "dtype": "use target.dtype",
    "tensor_parallel_size": "use target.tensor_parallel_size",
    "max_num_seqs": "use target.settings.slots",
    "max_model_len": "use target.settings.context",
    "speculative_config": "use target.settings.lookahead",
    "worker_cls": "it is how drafts reach vLLM",
    "skip_tokenizer_init": "text is made elsewhere",
    "pipeline_parallel_size": "vLLM takes drafts on one stage only; use target.tensor_parallel_size",
    "data_parallel_size": "use target.replicas",
    "async_scheduling": "vLLM cannot schedule ahead of drafts that come from outside",
}
"""Arguments of vLLM that cannot be passed on, and why."""


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """What is to be built.

    folder: of the checkpoint. lookahead: most drafts per sequence and pass; None leaves vLLM's own decoding as it is,
    without Outrider's sampler. prefill: prompt tokens in one pass. arguments: vLLM's own, passed on as they are.
    own_speculation: vLLM's own way of speculating, in place of ours; to compare with.
    """

    folder: str
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    slots: int = 16
    context: int = 2048
    prefill: int = 256
    lookahead: int | None = 8
    arguments: dict[str, Any] = field(default_factory=dict)
    worker: str = f"{INTERNALS}.MailboxWorker"
    own_speculation: dict[str, Any] | None = None


def check_version() -> None:
    """Raises ConfigError when vLLM is missing, or of a version whose internals were not tried."""
    try:
        from vllm import __version__ as version
    except ImportError as error:
        raise ConfigError(
            f"target.engine 'vllm' needs vLLM, which is not installed ({error})", "target.engine"
        ) from error
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers != TRIED:
        tried = ".".join(map(str, TRIED))
        raise ConfigError(f"vLLM {version} is installed; target.engine 'vllm' was tried with {tried}", "target.engine")


def engine_arguments(plan: VllmPlan) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs, and that class under `_class`.

    Raises ConfigError for arguments that vLLM does not know, or that are given elsewhere.
    """
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    for name in plan.arguments:
        if name in _OURS:
            raise ConfigError(
                f"target.engine_kwargs.{name} cannot be set: {_OURS[name]}", f"target.engine_kwargs.{name}"
            )
        if name not in known:
            raise ConfigError(f"target.engine_kwargs.{name}: vLLM has no such argument", f"target.engine_kwargs.{name}")
    if plan.arguments.get("distributed_executor_backend") == "ray" and not current_platform.ray_device_key:
        key = "target.engine_kwargs.distributed_executor_backend"
        raise ConfigError(f"{key}: vLLM has no Ray executor on this platform ({current_platform.device_name})", key)
    drafts = max(plan.lookahead or 0, 1)
    model = _described(plan.folder)
    positions = getattr(model, "max_position_embeddings", None) or plan.context + drafts
    # vLLM gives up drafting where a whole lookahead would pass the end of the context: a little more room avoids it.
    length = max(plan.context, min(plan.context + drafts, positions))
    arguments: dict[str, Any] = {
        "_class": AsyncEngineArgs,
        "model": plan.folder,
        "dtype": plan.dtype,
        "tensor_parallel_size": plan.tensor_parallel_size,
        "max_num_seqs": plan.slots,
        "max_model_len": length,
        "max_num_batched_tokens": plan.prefill + plan.slots * (drafts + 1),
        "max_logprobs": 20,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # defaults of sampling are the ingress's business
        "disable_log_stats": True,
        "additional_config": {**plan.arguments.get("additional_config", {}), "owner": OwnerWatch()},
    }
    if plan.own_speculation is not None:
        arguments["speculative_config"] = plan.own_speculation
    elif plan.lookahead is not None:
        arguments["worker_cls"] = plan.worker
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": f"{INTERNALS}.MailboxProposer",
            "num_speculative_tokens": drafts,
        }
        if current_platform.is_cpu() or plan.tensor_parallel_size > 1:  # or else vLLM has no processes for its ranks
            arguments["distributed_executor_backend"] = f"{INTERNALS}.MailboxExecutor"
    if current_platform.is_cpu() and model is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes(model, plan, length)
    return arguments | {name: value for name, value in plan.arguments.items() if name != "additional_config"}


def cache_bytes(model: Any, plan: VllmPlan, length: int) -> int:
    """Bytes of one rank's keys and values for all slots (on a CPU, where vLLM would take most of the memory)."""
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    per_token = 2 * model.num_hidden_layers * max(heads // plan.tensor_parallel_size, 1) * size * 4
    blocks = plan.slots * (-(-length // _CPU_BLOCK) + 1) + 1
    return int(blocks * _CPU_BLOCK * per_token)


def _described(folder: str) -> Any:
    """The checkpoint's own description; None where only vLLM can read it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError):
        return None
