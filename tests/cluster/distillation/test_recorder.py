"""The recorder of served traffic."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest
import torch
from small_targets import llama, prompts, settings, target

from actors.errors import ConfigError
from actors.messages import Alternatives
from cluster.distillation.recorder import Served, TrafficRecorder, recorded_fingerprint, recorded_samples
from cluster.distillation.run import distill

SECRET = b"0123456789abcdef"


def served(owner: str = "ann", length: int = 4, alternatives: bool = True) -> Served:
    answer = list(range(10, 10 + length))
    top = [Alternatives(-0.1, ((t + 1, -2.5), (t, -0.1))) for t in answer] if alternatives else []
    return Served(owner, (5, 6), answer, 0.5, top)


def test_what_was_served_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "traffic.db"
    recorder = TrafficRecorder(file, secret=SECRET, fingerprint="abc")
    assert recorder.offer(served())
    assert recorder.offer(served(alternatives=False, length=2))
    assert not recorder.offer(Served("ann", (5,), ()))
    recorder.close()
    rich, bare = recorded_samples(file)
    assert rich.prompt.tolist() == [5, 6]
    assert rich.answer.tolist() == [10, 11, 12, 13]
    assert rich.top_ids.tolist() == [[t, t + 1] for t in (10, 11, 12, 13)]  # best first
    torch.testing.assert_close(rich.top_logp, torch.tensor([[-0.1, -2.5]] * 4).half())
    assert rich.temperature == 0.5
    assert bare.top_ids.tolist() == [[10], [11]]
    assert bare.top_logp.tolist() == [[0.0], [0.0]]
    assert recorded_fingerprint(file) == "abc"


def test_names_are_not_stored_and_others_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "traffic.db"
    recorder = TrafficRecorder(file, secret=SECRET)
    recorder.offer(served("ann@example.org"))
    recorder.close()
    assert b"ann" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keys = []
    for secret in (SECRET, SECRET, b"another secret of 32 bytes......"):
        other = TrafficRecorder(tmp_path / f"{len(keys)}.db", secret=secret)
        keys.append(other._hash("ann"))
        other.close()
    assert keys[0] == keys[1] != keys[2]


def test_the_store_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    file = tmp_path / "traffic.db"
    recorder = TrafficRecorder(file, secret=SECRET, tokens=50)
    for length in range(1, 13):  # 2 + length tokens each
        recorder.offer(served(length=length, alternatives=False))
        recorder.flush()
    recorder.close()
    # 14 + 13 + 12 = 39 fit into 50; the next older one has 11 tokens, and fits just so; the one before does not.
    assert [len(sample) for sample in recorded_samples(file)] == [11, 12, 13, 14]


def test_the_buffer_is_bounded(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "traffic.db", secret=SECRET, pending=2)
    assert [recorder.offer(served()) for _ in range(3)] == [True, True, False]
    assert recorder.dropped == 1
    assert recorder.flush() == 2
    assert recorder.flush() == 0
    assert recorder.offer(served())
    recorder.close()


def test_an_owner_can_be_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "traffic.db"
    recorder = TrafficRecorder(file, secret=SECRET)
    for owner in ("ann", "ben", "ann"):
        recorder.offer(served(owner))
    recorder.flush()
    recorder.offer(served("ann"))
    assert recorder.forget("ann") == 3
    recorder.close()
    assert len(list(recorded_samples(file))) == 1


def test_a_disk_that_refuses_costs_answers_only(tmp_path: Path) -> None:
    file = tmp_path / "traffic.db"
    recorder = TrafficRecorder(file, secret=SECRET)
    blocker = sqlite3.connect(file, isolation_level=None)
    blocker.execute("PRAGMA max_page_count = 1")
    recorder._database.execute("PRAGMA busy_timeout = 0")
    blocker.execute("BEGIN EXCLUSIVE")
    recorder.offer(served())
    assert recorder.flush() == 0
    assert recorder.dropped == 1
    blocker.execute("ROLLBACK")
    blocker.close()
    recorder.offer(served())
    assert recorder.flush() == 1
    recorder.close()


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "traffic.db"
    TrafficRecorder(file, secret=SECRET, fingerprint="one").close()
    with pytest.raises(ConfigError, match="another vocabulary"):
        TrafficRecorder(file, secret=SECRET, fingerprint="two")
    with pytest.raises(ConfigError, match="16 to 64 bytes"):
        TrafficRecorder(file, secret=b"short")
    (tmp_path / "letter.txt").write_text("Dear Ann, " * 100)
    with pytest.raises(ConfigError, match="no file of recorded traffic"):
        list(recorded_samples(tmp_path / "letter.txt"))
    with pytest.raises(ConfigError, match="cannot record traffic"):
        TrafficRecorder(tmp_path / "letter.txt", secret=SECRET)


def test_traffic_is_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "traffic.db"
    recorder = TrafficRecorder(file, secret=SECRET)
    for number in range(30):
        recorder.offer(served(str(number), alternatives=number % 2 == 0))
    recorder.close()
    card = distill(
        target(llama()),
        prompts(),
        tmp_path / "draft",
        settings(max_tokens=1, max_steps=3),
        traffic=recorded_samples(file),
    )
    assert card["sampled_tokens"] > 30 * 4  # the traffic, and one shard of the target's answers
    big = tmp_path / "big.db"
    recorder = TrafficRecorder(big, secret=SECRET)
    recorder.offer(Served("ann", (5,), (61,)))
    recorder.close()
    with pytest.raises(ConfigError, match="ids outside the target's vocabulary of 61"):
        distill(target(), prompts(), tmp_path / "two", settings(), traffic=recorded_samples(big))
