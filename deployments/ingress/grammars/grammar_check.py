"""Whether a client's grammar can be followed, found out where it can do no harm.

Compiling a grammar is native code that nothing can interrupt, and a few hundred bytes can keep it busy for ever (an
intersection of many patterns, for example). So it is tried first in a process of its own, with bounds on its time and
memory: only what passes there reaches the thread that runs the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from actors.errors import InvalidSettingError, OverloadedError, UnavailableError

LIMIT_S = 1.0
"""Of the process's own computing: a busy machine, on which it gets few turns, is no fault of the grammar."""
PATIENCE = 30
"""A process that gets no turns at all is waited for this many times as long by the clock."""
MEMORY_BYTES = 2 << 30
MOST_WAITING = 64
REMEMBERED = 512
LIMIT_REMEMBERED_S = 60.0
"""That a bound was passed is measured, so it is tried again after this time; what is wrong with a grammar is not."""

_PROGRAM = """
import json, resource, signal, sys
from llguidance import LLMatcher
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
print("ready", flush=True)
for line in sys.stdin:
    # Nobody handles the signals: they end the process.
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))
    problem = LLMatcher.validate_grammar(json.loads(line))
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(problem), flush=True)
"""


@dataclass(frozen=True, slots=True)
class _Finding:
    """What is wrong with a grammar, empty if nothing is; and until when that holds, by the check's clock."""

    problem: str
    until: float = math.inf


class GrammarCheck:
    """Lives on one event loop. One grammar at a time; what was found is remembered.

    limit_s bounds the computing that one grammar may take; the process is started when it is first needed, and after
    it was ended.
    """

    def __init__(self, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._process: subprocess.Popen[str] | None = None
        self._found: OrderedDict[str, _Finding] = OrderedDict()
        self._waiting = 0

    async def check(self, grammar: str, param: str) -> None:
        """Raises InvalidSettingError unless it can be followed; OverloadedError when too many wait for that, and
        UnavailableError when the machine is too busy to tell."""
        finding = self._found.get(grammar)
        if finding is None or finding.until < self._clock():
            if self._waiting >= MOST_WAITING:
                raise OverloadedError(f"{MOST_WAITING} grammars are waiting to be compiled; try again later")
            self._waiting += 1
            try:
                finding = await asyncio.get_running_loop().run_in_executor(self._thread, self._try, grammar)
            finally:
                self._waiting -= 1
            self._found[grammar] = finding
            if len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        if finding.problem:
            raise InvalidSettingError(f"not a grammar that can be followed: {finding.problem}", param)

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            _end(self._process)

    def _try(self, grammar: str) -> _Finding:
        """What is wrong with it. Raises UnavailableError when the process got no turns."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            told = process.stdout.readline()
        except OSError:
            told = ""
        if told:
            problem: str = json.loads(told)
            return _Finding(problem.splitlines()[0][:300] if problem else "")
        self._process = None
        ended_by = -process.wait()
        _end(process)
        if ended_by == signal.SIGALRM:
            raise UnavailableError("the server is too busy to compile the grammar of this request; try again later")
        limit = f"it takes more than {self._limit_s:g} s, or too much memory, to compile"
        return _Finding(limit, self._clock() + LIMIT_REMEMBERED_S)

    def _start(self) -> subprocess.Popen[str]:
        bounds = [self._limit_s, MEMORY_BYTES, PATIENCE * self._limit_s]
        command = [sys.executable, "-c", _PROGRAM, *map(str, bounds)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()  # imports are not what is measured
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not read any more
                pipe.close()
