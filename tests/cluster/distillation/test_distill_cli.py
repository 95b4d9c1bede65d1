"""`outrider distill` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_targets import checkpoint
from typer.testing import CliRunner

from cluster.distillation import training
from cluster.distillation.recorder import Served, TrafficRecorder
from cluster.models import references, weights
from deployments.cli.distill import app

runner = CliRunner()
WORDS = [f"{a} {b}?" for a in ("how", "why", "when", "who") for b in ("is it", "was that", "are they", "do we")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    checkpoint(folder / "target")
    (folder / "prompts.txt").write_text("\n".join(WORDS))
    return folder


def command(place: Path, out: str, *more: str) -> list[str]:
    options = ["--layers", "2", "--vocabulary", "24", "--answer", "8", "--context", "64", "--minutes", "0.01"]
    paths = [str(place / "target"), "--prompts", str(place / "prompts.txt"), "--out", str(place / out)]
    return [*paths, *options, "--device", "cpu", "--arithmetic", "float32", *more]


def test_a_draft_is_made_and_loads_as_a_draft(place: Path) -> None:
    result = runner.invoke(app, command(place, "draft"))
    assert result.exit_code == 0, result.output
    assert "greedy agreement" in result.output
    assert "training" in result.output
    assert f"draft.model: {place / 'draft'}" in result.output
    loaded = weights.load_model(str(place / "draft"), device="cpu")
    assert loaded.vocabulary is not None
    assert len(loaded.vocabulary) == 24
    cache = loaded.cache(slots=1, context=8)
    assert loaded.fingerprint == weights.load_model(str(place / "target"), device="cpu").fingerprint
    from actors.engines.transformers.slots import SlotRow

    assert loaded.run(cache, [SlotRow(0, (3, 4), 0)], [1]).shape == (1, 24)


def test_a_draft_that_reads_hidden_states_is_made_and_served_as_such(place: Path) -> None:
    result = runner.invoke(app, command(place, "reader", "--kind", "hidden_states", "--layers", "1"))
    assert result.exit_code == 0, result.output
    assert f"draft.model: {place / 'reader'}, draft.kind: hidden_states" in result.output
    loaded = weights.load_feature_draft(str(place / "reader"), str(place / "target"), device="cpu")
    assert loaded.vocabulary is not None
    assert len(loaded.vocabulary) == 24
    assert loaded.fingerprint == weights.load_model(str(place / "target"), device="cpu").fingerprint
    refused = runner.invoke(app, command(place, "two", "--kind", "hidden_states"))  # of two layers
    assert refused.exit_code == 2
    assert "has one layer" in refused.output


def test_the_next_draft_begins_from_the_last_and_is_tried_on_prompts_of_its_own(place: Path) -> None:
    assert runner.invoke(app, command(place, "first")).exit_code == 0
    held = place / "held.json"
    held.write_text('["whose is it?", "whom do we see?"]')
    options = ["--start", str(place / "first"), "--held", str(held), "--minutes", "0.01", "--context", "64"]
    paths = [str(place / "target"), "--prompts", str(place / "prompts.txt"), "--out", str(place / "second")]
    result = runner.invoke(app, [*paths, *options, "--answer", "8", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    card = json.loads((place / "second" / "card.json").read_text())
    assert card["held_prompts"] == 2
    assert card["start"] == str(place / "first")
    assert card["draft_vocabulary"] == 24  # the first one's, not the default
    first, second = (load_file(place / name / "draft_vocab.safetensors")["draft_vocab"] for name in ("first", "second"))
    assert torch.equal(first, second)
    assert (
        len({name.split(".")[2] for name in load_file(place / "second" / "model.safetensors") if "layers" in name}) == 2
    )
    assert "may have been trained on" not in result.output
    result = runner.invoke(app, command(place, "third", "--start", str(place / "first")))
    assert "may have been trained on the prompts kept here: give --held FILE" in result.output


def test_a_start_with_another_vocabulary_is_refused(place: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    other = checkpoint(place / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["zz"])
    tokenizer.save_pretrained(other)
    result = runner.invoke(app, command(place, "none", "--start", str(other)))
    assert result.exit_code == 2
    assert "it has another vocabulary" in result.output


def test_recorded_traffic_is_enough(place: Path) -> None:
    """No prompts but those that were served: some are kept from training, the answers to the others are learned."""
    fingerprint = references.vocabulary_fingerprint(references.load_tokenizer(str(place / "target")))
    recorder = TrafficRecorder(place / "traffic" / "one.db", secret=b"0123456789abcdef", fingerprint=fingerprint)
    for n in range(10):
        recorder.offer(Served("me", (1, 3 + n, 4), (5, 6, 7)))
    recorder.offer(Served("me", tuple(range(3, 30)) * 3, (5,)))  # does not fit
    recorder.close()
    options = ["--traffic", str(place / "traffic"), "--sampling-share", "0", "--out", str(place / "served")]
    tail = ["--layers", "1", "--context", "64", "--answer", "8", "--minutes", "0.01", "--device", "cpu"]
    result = runner.invoke(app, [str(place / "target"), *options, *tail])
    assert result.exit_code == 0, result.output
    card = json.loads((place / "served" / "card.json").read_text())
    assert card["held_prompts"] == 2
    assert card["sampled_tokens"] == 8 * 3 + 1
    result = runner.invoke(app, [str(place / "target"), "--out", str(place / "none"), "--own-prompts", "0"])
    assert result.exit_code == 2
    assert "there is nothing to ask: leave --own-prompts out, or give --prompts or --traffic" in result.output


def test_what_is_there_is_said_before_anything_is_loaded(place: Path) -> None:
    (place / "taken").mkdir()
    (place / "taken" / "file").touch()
    result = runner.invoke(app, command(place, "taken"))
    assert result.exit_code == 2
    assert "exists already" in result.output


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "holds no prompts"),
        ("a" * 60, "line 1: the prompt has 62 tokens; at most 56 fit"),
        ("only one", "at least two prompts"),
    ],
)
def test_bad_prompts(place: Path, prompts: str, message: str) -> None:
    file = place / "bad.txt"
    file.write_text(prompts)
    result = runner.invoke(app, [*command(place, "none"), "--prompts", str(file)])
    assert result.exit_code == 1
    assert message in result.output
    assert not (place / "none").exists()


def test_missing_files(place: Path) -> None:
    result = runner.invoke(app, [*command(place, "none"), "--prompts", str(place / "nowhere.txt")])
    assert result.exit_code == 2
    assert "there is no file of prompts" in result.output
    result = runner.invoke(app, command(place, "none", "--traffic", str(place / "nowhere.db")))
    assert result.exit_code == 2
    assert "there is no recorded traffic" in result.output


def test_a_slow_tokenizer_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        is_fast = False

    monkeypatch.setattr("cluster.models.references.load_tokenizer", lambda reference: Slow())
    result = runner.invoke(app, command(place, "none"))
    assert result.exit_code == 2
    assert "slow tokenizer" in result.output


def test_an_interrupt_is_answered_with_how_to_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "step", interrupted)
        result = runner.invoke(app, command(place, "cut"))
    assert result.exit_code == 130
    assert "The same command goes on from here" in result.output
    assert (place / "cut.partial" / "training.pt").exists()
