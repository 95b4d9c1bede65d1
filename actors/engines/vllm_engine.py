"""vLLM's AsyncLLM, through its public API, on a thread and event loop of its own.

Sequences are started and ended here, and what they say comes out in the order of vLLM's passes. Which tokens that is,
is decided in vLLM's workers (vllm_internals.py); nothing here leans on vLLM's internals.

vLLM is imported when an engine is built, never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.engines.vllm_requests import Request
from actors.errors import ConfigError, EngineError
from actors.messages import Alternatives

logger = logging.getLogger(__name__)

TRIED = (0, 32)
"""The minor version of vLLM whose internals were tried."""
_CPU_BLOCK = 128
"""Positions in a block of vLLM's cache on a CPU."""
INTERNALS = "actors.engines.vllm_internals"
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


@dataclass(frozen=True, slots=True)
class Said:
    """What a sequence said in one or more passes; `finish` is vLLM's reason, `error` why it said nothing."""

    sequence: str
    tokens: tuple[int, ...] = ()
    alternatives: tuple[Alternatives, ...] = ()
    finish: str | None = None
    error: Exception | None = None


class VllmEngine:
    """Builds the engine and runs it until `close`. Methods may be called from any one thread.

    wake: called, on the engine's thread, when `take` has something.
    Raises ConfigError when vLLM cannot be started as planned; nothing is left running then.
    """

    def __init__(self, plan: VllmPlan, wake: Callable[[], None] = lambda: None) -> None:
        self._plan, self._wake = plan, wake
        self._said: list[Said] = []
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._flush_due = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.failure: Exception | None = None
        """Why the engine is dead; None while it lives."""
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        check_version()
        self._thread.start()
        try:
            with tempfile.TemporaryDirectory(prefix="outrider-vllm-") as folder:
                log = Path(folder) / "failures.log"
                try:
                    self._llm = self._wait(self._build(Path(folder), log))
                except Exception as error:
                    raise ConfigError(f"vLLM cannot serve {plan.folder}: {_reason(error, log)}", "target") from error
        except BaseException:
            self._end_loop()
            raise
        self.config: Any = self._llm.vllm_config

    async def _build(self, folder: Path, log: Path) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(self._plan)
        arguments.setdefault("logging_config", _logging(folder, log))
        with _environment(self._plan.tensor_parallel_size):
            return AsyncLLM.from_engine_args(arguments.pop("_class")(**arguments))

    # -- sequences ------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Begin a sequence; what it says comes out of `take`."""
        self._loop.call_soon_threadsafe(self._begin, request)

    def end(self, sequences: Sequence[str]) -> None:
        """Abort sequences; those that are not known are ignored."""
        self._loop.call_soon_threadsafe(self._abort, tuple(sequences))

    def take(self) -> list[Said]:
        """What was said since the last call. Raises EngineError when the engine died."""
        if self.failure is not None:
            raise EngineError(f"vLLM died: {self.failure}") from self.failure
        with self._lock:
            said, self._said = self._said, []
            self._news.clear()
        return said

    @property
    def has_news(self) -> bool:
        """Is there something to take?"""
        return self.failure is not None or self._news.is_set()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to take, at most `timeout_s`."""
        if self.failure is None:
            self._news.wait(timeout_s)

    def tell_workers(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call a method of every worker and return the answers."""
        answers: list[Any] = self._wait(self._llm.collective_rpc(method, timeout=timeout_s, args=arguments))
        return answers

    def close(self) -> None:
        """End all sequences, vLLM's processes and the thread."""
        if self._llm is not None:
            self._wait(self._stop())
            self._llm = None
            self._end_loop()

    # -- on the engine's thread -----------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        self._tasks[request.name] = self._loop.create_task(self._follow(request))

    def _abort(self, sequences: tuple[str, ...]) -> None:
        for name in sequences:
            task = self._tasks.pop(name, None)
            if task is not None:
                task.cancel()

    async def _follow(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            params = SamplingParams(**request.params, output_kind=RequestOutputKind.DELTA)
            stream = self._llm.generate({"prompt_token_ids": list(request.tokens)}, params, request.name)
            async for output in stream:
                self._put(_said(request, output.outputs[0]))
        except asyncio.CancelledError:
            raise
        except EngineDeadError as error:
            self.failure = error
            self._news.set()
            self._wake()
        except Exception as error:  # refused by vLLM: its own message says what and why
            self._put(Said(request.name, error=error))
        finally:
            if self._tasks.get(request.name) is asyncio.current_task():
                del self._tasks[request.name]

    def _put(self, said: Said) -> None:
        """Everything that one pass said goes out together: the tasks of a pass all run in one turn of the loop."""
        with self._lock:
            self._said.append(said)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._news.set()
        self._wake()

    async def _stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._llm.shutdown()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()


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
    if current_platform.is_cpu() and model is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes(model, plan, length)
    return arguments | plan.arguments


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


def _said(request: Request, output: Any) -> Said:
    tokens = tuple(output.token_ids)
    wanted = request.params["logprobs"]
    found: tuple[Alternatives, ...] = ()
    if wanted is not None and output.logprobs:
        found = tuple(_alternatives(line, token, wanted) for line, token in zip(output.logprobs, tokens, strict=False))
    return Said(request.name, tokens, found, output.finish_reason)


def _alternatives(line: dict[int, Any], token: int, count: int) -> Alternatives:
    best = sorted(((t, entry.logprob) for t, entry in line.items()), key=lambda pair: -pair[1])
    return Alternatives(line[token].logprob, tuple(best[:count]))


def _logging(folder: Path, log: Path) -> Any:
    """vLLM's processes report to the terminal what matters, and tell here why they fail."""
    from vllm.config import LoggingConfig

    described = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "%(levelname)s %(asctime)s [vllm] %(message)s"},
            "bare": {"format": "%(message)s"},
        },
        "handlers": {
            "terminal": {"class": "logging.StreamHandler", "formatter": "line", "level": "WARNING"},
            "failures": {"class": "logging.FileHandler", "formatter": "bare", "level": "ERROR", "filename": str(log)},
        },
        "loggers": {"vllm": {"handlers": ["terminal", "failures"], "level": "INFO", "propagate": False}},
    }
    file = folder / "logging.json"
    file.write_text(json.dumps(described))
    return LoggingConfig(pylogging_config_file=str(file))


def _reason(error: Exception, log: Path) -> str:
    """Why vLLM did not start, in one line: its processes log the cause and only say that they failed."""
    causes = re.findall(r"^(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt)): (.+)$", _read(log), re.MULTILINE)
    if causes:
        return str(causes[0][1]).strip()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("Value error, ", "Assertion failed, "))]
    text = (telling or lines or [type(error).__name__])[0]
    return re.sub(r"^(Value error|Assertion failed), | \[type=.*$", "", text)


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


@contextlib.contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """On a CPU, vLLM binds each rank's threads to cores of its own; with fewer cores than ranks they share."""
    name = "VLLM_CPU_OMP_THREADS_BIND"
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if name in os.environ or not cores:
        yield
        return
    share = len(cores) // ranks
    bind = "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks)) if share else "nobind"
    os.environ[name] = bind
    try:
        yield
    finally:
        del os.environ[name]
