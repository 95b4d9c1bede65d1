"""The command line without a server: help that costs nothing, and one line with exit code 2 for what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import Reciter, byte_codec

from actors.messages import Usage
from cluster.config.deployment import load_config
from deployments.cli import answer, main
from deployments.cli.acceptance import achieved
from deployments.cli.speed_comparison import Summary, compare
from deployments.client.client import Client
from deployments.client.results import Result
from deployments.client.timing import Timing
from deployments.runtime.local import interruptible, stop_if_asked, wait_for_interrupt


def outrider(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.main(list(arguments))
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom deployments.cli import main\n"
        "try:\n    main.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("serve", "demo", "generate", "chat", "status", "bench", "models", "config"):
        assert command in done.stdout


def test_help_shows_how(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "generate", "status", "batch", "plan", "acceptance"):
        code, out, _ = outrider(capsys, command, "--help")
        assert code == 0
        assert f"outrider {command} " in out
    code, out, _ = outrider(capsys, "--version")
    assert (code, len(out.split())) == (0, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("a: [", "is not YAML"),
        ("targett: {}", "targett: there is no such setting; did you mean target?"),
        ("target: {settings: {slot: 8}}", "target.settings.slot: there is no such setting; did you mean slots?"),
        ("target: {replicas: -1}", "target.replicas"),
        ("orchestrator: {settings: {request_timeout_s: -5}}", "request_timeout_s"),
        ("target: {engine: emulated}", "emulated"),
    ],
)
def test_bad_configurations_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, told: str
) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    for command in (["config", "check", str(path)], ["serve", str(path)]):
        code, out, err = outrider(capsys, *command)
        assert (code, out) == (2, "")
        assert told in err
        assert len(err.splitlines()) == 1


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for command in (["serve", "demo", "--port", port], ["demo", "--port", port]):
            code, _, err = outrider(capsys, *command)
            assert code == 2
            assert f"port {port} is in use" in err
            assert len(err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_dropped_is_not_lost(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with interruptible():
        with contextlib.suppress(KeyboardInterrupt):  # as a destructor would
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            stop_if_asked()
        wait_for_interrupt()
    assert signal.getsignal(number) == former
    stop_if_asked()


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("target: {model: ./nowhere}\ndraft: {kind: none}\ningress: {port: 1}\n")
    code, _, err = outrider(capsys, "models", "fetch", "./nowhere")
    assert code == 2
    assert "./nowhere" in err


def test_no_server_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outrider(capsys, "status", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "cannot be reached" in err


def test_bytes_that_are_no_utf8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As an argument and in a pipe one line; in a chat the line is refused, and the others are answered."""
    reciter = Reciter(byte_codec(), says="Hello.")
    monkeypatch.setattr(answer, "client_of", lambda url, key: Client(reciter))
    for arguments, given in ((["generate", "a\udcff"], b""), (["generate", "-"], b"a\xff")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        code, out, err = outrider(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err == "outrider: this is not UTF-8: it has the byte 0xFF\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntw\xffo\nthree\n"), "utf-8"))
    code, out, err = outrider(capsys, "chat")
    assert code == 1
    assert out.count("Hello.") == 2
    assert err.count("not UTF-8") == 1
    said = [[message["content"] for message in request.messages or ()] for request in reciter.requests]
    assert said == [["one"], ["one", "Hello.", "three"]]


def test_a_plan_begins_with_what_it_assumes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One rule and no prices: the columns for both would hold nothing but dashes, and are left out."""
    path = tmp_path / "plan.yaml"
    path.write_text("effort: 50\nlookaheads: [4]\n")
    times = ["--pass-ms", "20", "--step-ms", "4", "--acceptance", "0.7", "--sequences", "2"]
    _, out, _ = outrider(capsys, "plan", str(path), *times)
    lines = out.splitlines()
    assert lines[0].startswith("Assumed")
    assert "a target pass takes 20 ms + 0 ms a token, with 2 sequences at once on each target" in lines[1]
    assert "a draft step takes 4 ms" in lines[2]
    assert "rule coupled: 70% of draft tokens accepted" in lines[3]
    header = next(line for line in lines if "speed-up" in line)
    assert "rule" not in header
    assert "per 1M tokens" not in header
    _, out, _ = outrider(capsys, "plan", str(path), *times, "--target-gpu-hour", "3", "--draft-gpu-hour", "1")
    assert "per 1M tokens" in next(line for line in out.splitlines() if "speed-up" in line)


def test_status_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids stay whole; whether the server is ready is of the same look as the rows."""
    target = {"sequences": 1, "running": 1.0, "slots": 16.0, "waiting": 0.0, "kv_share": 0.01, "lookahead": 0.3,
              "acceptance_rate": 0.87, "acceptance_length": 1.3, "held": 0.0, "gain": 1.42}  # fmt: skip
    draft = {"sequences": 1, "sessions": 1.0, "slots": 32.0, "step_s": 0.0118, "drafted": 5.1}
    reciter = Reciter(byte_codec(), is_ready=True)
    reciter.tiers = {
        "target": {"replicas": {"outrider:target:5z7hmblq.0": target}},
        "draft": {"replicas": {"outrider:draft:ka3nuuzd.0": draft}},
        "ready": False,
    }
    monkeypatch.setattr(main, "client_of", lambda url, key: Client(reciter))
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = outrider(capsys, "status")
    assert code == 1
    assert "not ready" in out
    assert max(map(len, out.splitlines())) <= 80
    for whole in ("5z7hmblq.0", "ka3nuuzd.0"):
        assert whole in out
    assert "1.42" not in out  # an estimate
    code, out, _ = outrider(capsys, "status", "--json")
    assert json.loads(out)["ready"] is False


def test_config_check_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outrider(capsys, "config", "check", "demo", "--json")
    assert code == 0
    assert json.loads(out)["target"]["model"] == "demo:smollm2-135m"


@pytest.mark.filterwarnings("ignore")  # of Ray's own models
def test_the_demo_s_file_is_what_serve_deploy_takes() -> None:
    from ray.serve.schema import ServeDeploySchema

    path = Path(main.__file__).parents[1] / "demo.yaml"
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert schema.applications[0].import_path == "deployments.app:build"
    assert load_config(schema.applications[0].args) == load_config(path)
    assert schema.http_options.host == load_config(path).ingress.host


def test_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("effort: 50\nlookaheads: [4]\n")
    code, out, _ = outrider(
        capsys, "plan", str(path), "--pass-ms", "25", "--step-ms", "3", "--acceptance", "0.8", "--json"
    )
    told = json.loads(out)
    assert code == 0
    assert told["pays"]
    assert told["rows"][0]["speedup"] == 1.0
    path.write_text("efort: 50\n")
    code, _, err = outrider(capsys, "plan", str(path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "plan: efort: there is no such setting; did you mean effort?" in err
    path.write_text("patience: 5\n")
    code, _, err = outrider(capsys, "plan", str(path), "--traffic", "burst")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "patience: there is no such setting; did you mean patience_s?" in err
    code, _, err = outrider(capsys, "plan", "--target", "abacus-70b")
    assert (code, len(err.splitlines())) == (2, 1)


def test_acceptance_is_read_off_the_origins() -> None:
    """Passes of 2 accepted + correction, plain, 1 accepted + bonus, and 1 accepted that a cap cut: 7 tokens in 4."""
    result = Result(0, tokens=list(range(7)), usage=Usage(proposed_tokens=8, accepted_tokens=4))
    result.origins = ["accepted", "accepted", "correction", "plain", "accepted", "bonus", "accepted"]
    told = achieved([result])
    assert (told["passes"], told["acceptance_length"], told["acceptance_rate"]) == (4, 7 / 4, 0.5)
    assert told["plain_share"] == 1 / 4
    assert told["accepted_per_pass"] == {0: 1 / 4, 1: 1 / 2, 2: 1 / 4}


def test_comparison_figures() -> None:
    answers = [Timing([1, 2, 3], [1.0, 1.0, 1.0], 0.5, 2.5, [1.0, 1.0]), Timing([4], [1.0], 0.1, 0.1, [])]
    summary = Summary(answers)
    assert summary.tokens_per_s == 4 / 2.6
    assert summary.gap_s(0.5) == 1.0
    assert summary.first_token_s == 0.5
    assert Summary([]).gap_s(0.5) == 0.0
    other = [Timing([1, 9, 9], []), Timing([4], [])]
    assert not compare(answers, other).same
    answers[0].margins[1] = 1e-4
    assert compare(answers, other).same
    assert compare(answers, other).ties == 1
