"""What goes wrong with a vLLM target: drafts that get lost, internals that move, configurations that cannot work."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pass_exchanges import Fuse, FusedExchange
from vllm_stack import checkpoint, draft, engines, model, plan, prompts, settings, stack, words

from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.plan import check_version
from actors.errors import ConfigError
from actors.text.answer_comparison import Comparison, Reference

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(Path(tmp_path_factory.mktemp("tiny")))


async def test_a_mailbox_that_dies_costs_drafts_and_no_token(folder: str) -> None:
    """Under the rejection rule, so that q reaches vLLM: a draft that is the target has all its drafts accepted."""
    pair = stack(model(folder), lambda: draft(0.0, "rejection"), settings("rejection"), FusedExchange)
    async with pair as running:
        usages = [answer.last.usage for answer in await running.ask_all(prompts(8), temperature=0.3)]
        proposed = sum(usage.proposed_tokens for usage in usages if usage)
        accepted = sum(usage.accepted_tokens for usage in usages if usage)
        assert proposed > 40  # where the draft has guessed what the target says by itself in between
        assert accepted == proposed  # a one-hot q would accept p(token) of them

        prompt = prompts(1, seed=4)[0]
        reference = await running.ask(prompt, speculation=False, max_tokens=100, margins=True)
        exchange = running.target.exchange
        exchange.fuse = fuse = Fuse(f"ask-{running.number + 1}", len(prompt) + 40, running.target.lose_mailbox)
        answer = await running.ask(prompt, max_tokens=100)
        comparison = Comparison()
        comparison.add("cut", Reference(reference.tokens, reference.margins), answer.tokens)
        assert comparison.same, str(comparison.different)
        before, after = answer.origins[: fuse.position - len(prompt)], answer.origins[fuse.position - len(prompt) :]
        assert 40 <= len(before) < 45
        assert before.count("accepted") >= 18  # of two tokens at least one, past the first pass
        assert after == ["plain"] * (100 - len(before))
        again = await running.ask(prompt, max_tokens=20)
        assert again.tokens == reference.tokens[:20]
        assert again.origins == ["plain"] * 20  # drafts go on coming, and nobody asks for them


async def test_moved_internals_are_noticed_and_decoding_can_go_on_plainly(folder: str) -> None:
    """A worker whose rows are shifted decides other tokens as soon as there are drafts."""
    broken = model(folder, worker="broken_workers.ShiftedWorker", plain_if_incompatible=True)
    async with stack(broken, make_draft=None) as running:
        assert not running.target.speculates
        answer = await running.ask(prompts(1)[0], max_tokens=8)
        assert len(answer.tokens) == 8
        assert answer.last.usage is not None
        assert answer.last.usage.proposed_tokens == 0


async def test_moved_internals_are_refused_by_default(folder: str) -> None:
    with pytest.raises(ConfigError, match="has no discard_request_mask"):
        async with stack(model(folder, worker="broken_workers.RenamedWorker"), make_draft=None):
            pass
    assert engines() == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, "divisible by tensor parallel size"),
        ({"arguments": {"gpu_memory": 0.5}}, "gpu_memory: vLLM has no such argument"),
        ({"arguments": {"max_num_seqs": 4}}, "max_num_seqs cannot be set: use target.settings.slots"),
        ({"context": 4096}, "4096"),
        ({"arguments": {"distributed_executor_backend": "ray"}}, "no Ray executor on this platform (cpu)"),
        ({"arguments": {"quantization": "no-such-kind"}}, "no-such-kind"),
        ({"arguments": {"kv_cache_memory_bytes": 1}}, "No available memory"),
    ],
    ids=["ranks", "unknown", "reserved", "context", "ray", "quantization", "memory"],
)
def test_what_vllm_cannot_start_is_one_clear_message(folder: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        VllmEngine(plan(folder, **changes))
    text = str(refused.value)
    assert message in text
    assert "\n" not in text
    assert engines() == set()


def test_a_model_that_vllm_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama", "vocab_size": 8}')
    with pytest.raises(ConfigError, match="NoSuchModel"):
        VllmEngine(plan(str(tmp_path)))
    assert engines() == set()


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.1 is installed; target\.engine 'vllm' was tried with 0\.32"):
        check_version()


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
import vllm_stack
from actors.telemetry import MemoryRecorder
from actors.target.vllm_actor import VllmTargetActor

if __name__ == "__main__":
    target = VllmTargetActor("t", lambda: vllm_stack.model(sys.argv[1]), vllm_stack.settings(), MemoryRecorder())
    target.start()
    target._built.wait()
    print("up" if target._card else repr(target._failure), flush=True)
    time.sleep(600)
"""


def start_actor(folder: str, place: Path) -> subprocess.Popen[str]:
    """An actor in a process of its own, which works in `place`, as all its descendants do."""
    script = place / "actor.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    return subprocess.Popen(
        [sys.executable, str(script), folder],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def working_in(place: Path) -> list[psutil.Process]:
    """Processes of this machine that descend from the actor that works there, also when it is dead."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
            if process.cwd() == str(place):
                found.append(process)
    return found


def assert_all_end(place: Path) -> None:
    """Those that run now, and those that they have started meanwhile."""
    while left := working_in(place):
        _, alive = psutil.wait_procs(left, timeout=60)
        assert not alive


def test_a_killed_actor_leaves_nothing_running(folder: str, tmp_path: Path) -> None:
    """It says no goodbye: vLLM's processes notice that it is gone."""
    actor = start_actor(folder, tmp_path)
    assert actor.stdout is not None
    try:
        assert actor.stdout.readline().strip() == "up"
        assert len(working_in(tmp_path)) >= 3  # with vLLM's engine and its worker
    finally:
        actor.kill()
        actor.wait()
        actor.stdout.close()
    assert_all_end(tmp_path)


@pytest.mark.parametrize("moment", ["spawn_main", "VLLM::EngineCore", "VLLM::Worker"])
def test_an_actor_killed_while_vllm_starts_leaves_nothing_running(folder: str, tmp_path: Path, moment: str) -> None:
    """When vLLM's first process exists and knows nothing yet; when its engine has begun; when its worker has."""
    actor = start_actor(folder, tmp_path)
    deadline = time.monotonic() + 120.0
    try:
        while not any(moment in words(process) for process in working_in(tmp_path)):
            assert actor.poll() is None
            assert time.monotonic() < deadline, f"no process {moment} was seen"
            time.sleep(0.02)  # looking costs the time of those looked for
    finally:
        actor.kill()
        actor.communicate()
    assert_all_end(tmp_path)
