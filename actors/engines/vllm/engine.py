"""vLLM's AsyncLLM, through its public API, on a thread and event loop of its own.

Sequences are started and ended here, and what they say comes out in the order of vLLM's passes. Which tokens that is,
is decided in vLLM's workers (internals.py); nothing here leans on vLLM's internals.

vLLM is imported when an engine is built, never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.engines.vllm.plan import VllmPlan, check_version, engine_arguments
from actors.engines.vllm.requests import Request
from actors.errors import ConfigError, EngineError, InvalidSettingError, OutriderError
from actors.messages import Alternatives, FinishReason, VerificationResult

logger = logging.getLogger(__name__)


class VllmEngine:
    """Builds the engine and runs it until `close`. Methods may be called from any one thread.

    wake: called, on the engine's thread, when `take` has something.
    Raises ConfigError when vLLM cannot be started as planned; nothing is left running then.
    """

    def __init__(self, plan: VllmPlan, wake: Callable[[], None] = lambda: None) -> None:
        self._plan, self._wake = plan, wake
        self._results: list[VerificationResult] = []
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

    def take(self) -> list[VerificationResult]:
        """Tokens handed out since the last call, by the names of their requests.

        Raises EngineError when the engine died.
        """
        if self.failure is not None:
            raise EngineError(f"vLLM died: {self.failure}") from self.failure
        with self._lock:
            results, self._results = self._results, []
            self._news.clear()
        return results

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
            position = len(request.tokens)
            async for output in stream:
                result = _result(request, position, output.outputs[0])
                position += len(result.tokens)
                self._put(result)
        except asyncio.CancelledError:
            raise
        except EngineDeadError as error:
            self.failure = error
            self._news.set()
            self._wake()
        except Exception as error:  # refused by vLLM: its own message says what and why
            refusal = error if isinstance(error, OutriderError) else InvalidSettingError(str(error))
            self._put(VerificationResult(request.name, len(request.tokens), (), finish="error", error=refusal))
        finally:
            if self._tasks.get(request.name) is asyncio.current_task():
                del self._tasks[request.name]

    def _put(self, result: VerificationResult) -> None:
        """Everything that one pass decided goes out together: the tasks of a pass all run in one turn of the loop."""
        with self._lock:
            self._results.append(result)
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


def _result(request: Request, position: int, output: Any) -> VerificationResult:
    """What vLLM hands out at once, of one pass or several: which tokens were drafts it does not know."""
    tokens = tuple(output.token_ids)
    wanted = request.params["logprobs"]
    views: tuple[Alternatives, ...] = ()
    if wanted is not None and output.logprobs:
        views = tuple(_alternatives(line, token, wanted) for line, token in zip(output.logprobs, tokens, strict=False))
    return VerificationResult(request.name, position, tokens, finish=_finish(output.finish_reason), alternatives=views)


def _finish(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    return "stop" if reason == "stop" else "length" if reason == "length" else "error"


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
    """For vLLM's processes. They are spawned: an actor has threads, which a fork would cut off half-way.

    On a CPU, vLLM binds each rank's threads to cores of its own; with fewer cores than ranks they share. On a GPU it
    would tell its makers what it serves; who wants that sets VLLM_NO_USAGE_STATS=0.
    """
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores:
        share = len(cores) // ranks
        each = (",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks))
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(each) if share else "nobind"
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
