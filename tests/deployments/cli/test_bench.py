"""`outrider bench`: its figures, derived by hand, and a real load on a small server."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from actors.errors import OverloadedError, UnavailableError
from actors.messages import Delta, Usage
from deployments.cli import main
from deployments.cli.bench import PROMPTS, Load, figures, table
from deployments.client.timing import Timing


def answer(*steps: tuple[float, int], passes: int = 0, proposed: int = 0, accepted: int = 0) -> Timing:
    """An answer whose steps came at these seconds, with so many tokens each."""
    timing = Timing()
    for at, count in steps:
        timing.take(Delta(tokens=tuple(range(count))), at)
    timing.take(
        Delta(finish="length", usage=Usage(passes=passes, proposed_tokens=proposed, accepted_tokens=accepted)), 99
    )
    return timing


def test_tokens_that_came_together_share_the_time_since_those_before() -> None:
    timing = answer((0.5, 1), (0.8, 3), (0.8, 0), (1.0, 1))
    assert (timing.first, timing.total) == (0.5, 1.0)
    assert timing.gaps == pytest.approx([0.1, 0.1, 0.1, 0.2])


def test_figures_of_a_load() -> None:
    """Answers of 4 and 2 tokens in 3 target passes over 2 s; 5 draft tokens were verified and 3 accepted."""
    answers = [
        answer((0.1, 1), (0.4, 3), passes=2, proposed=4, accepted=3),
        answer((0.3, 1), (0.5, 1), passes=1, proposed=1),
    ]
    errors = [OverloadedError("full"), OverloadedError("full"), UnavailableError("gone")]
    told = figures(Load(answers, errors, seconds=2.0))
    assert (told["requests"], told["tokens"], told["tokens_per_s"]) == (5, 6, 3.0)
    assert told["errors"] == {OverloadedError.code: 2, UnavailableError.code: 1}
    # Nearest rank: of two values the second is the median; of the gaps 0.1, 0.1, 0.1, 0.2 the third.
    assert told["first_token_ms"] == {"p50": 300, "p90": 300, "p99": 300}
    assert told["inter_token_ms"] == {"p50": 100, "p90": 200, "p99": 200}
    assert told["request_ms"] == {"p50": 500, "p90": 500, "p99": 500}
    assert (told["acceptance_length"], told["acceptance_rate"]) == (2.0, 0.6)
    lines = "\n".join(table(told))
    assert f"5 requests in 2.0 s; errors: 2 {OverloadedError.code}, 1 {UnavailableError.code}" in lines
    assert "2.00 tokens per target pass" in lines
    assert "60.0%" in lines


def test_what_was_not_measured_is_null() -> None:
    """One token, no pass beyond the prompt's, no draft."""
    told = figures(Load([answer((0.1, 1))], [], seconds=1.0))
    assert told["inter_token_ms"] == {"p50": None, "p90": None, "p99": None}
    assert (told["acceptance_length"], told["acceptance_rate"], told["errors"]) == (None, None, {})
    assert "no draft token was verified" in "\n".join(table(told))


def outrider(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.main(list(arguments))
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, out, err = outrider(capsys, "bench", "--url", url, "--requests", "2")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "cannot be reached" in err


def test_a_file_without_prompts_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    code, out, err = outrider(capsys, "bench", "--prompts", str(tmp_path / "empty.txt"))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "holds no prompts" in err


@pytest.mark.ray
def test_a_load_on_a_real_server(emulated_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = ("bench", "--url", emulated_url, "--requests", "12", "--concurrency", "4", "--max-tokens", "24")
    code, out, err = outrider(capsys, *load, "--ignore-eos", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["requests"], told["errors"], told["tokens"]) == (12, {}, 12 * 24)
    assert told["tokens_per_s"] == pytest.approx(told["tokens"] / told["seconds"], rel=0.01)
    assert told["acceptance_length"] > 1
    assert 0 < told["acceptance_rate"] <= 1
    for name in ("first_token_ms", "inter_token_ms", "request_ms"):
        assert 0 <= told[name]["p50"] <= told[name]["p90"] <= told[name]["p99"]

    (tmp_path / "mine.txt").write_text("one\ntwo\n")
    mine = ("--prompts", str(tmp_path / "mine.txt"), "--raw", "--no-speculation", "--ignore-eos")
    code, out, _ = outrider(capsys, *load, *mine)
    assert code == 0
    assert "no draft token was verified" in out
    assert "288 tokens" in out


@pytest.mark.ray
def test_requests_that_fail_are_counted_and_named(
    emulated_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A prompt beyond the context is refused; the other one is answered."""
    (tmp_path / "two.txt").write_text("short\n" + "word " * 20_000 + "\n")
    prompts = ("--prompts", str(tmp_path / "two.txt"), "--raw", "--requests", "4", "--max-tokens", "4")
    code, out, err = outrider(capsys, "bench", "--url", emulated_url, *prompts, "--json")
    told = json.loads(out)
    assert code == 1
    assert (told["requests"], sum(told["errors"].values())) == (4, 2)
    assert err.startswith("the first error: ")


def test_there_are_prompts_for_a_load() -> None:
    assert len(set(PROMPTS)) == 8
