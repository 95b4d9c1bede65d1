"""A draft on trial: the decision on paper, and the exchange under a running application."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from actors.errors import ConfigError, UnavailableError
from cluster.config.deployment import DraftChoice, load_config
from deployments.cli.rollout import rollout, table
from deployments.client.client import connect
from deployments.client.results import Result
from deployments.runtime import ray_internals
from deployments.runtime.rollout import Lengths, live, of_results, roll_out, since
from deployments.runtime.served_application import ServedApplication, with_user_config

OLD, NEW = DraftChoice(model="old"), DraftChoice(model="new")
LOW, HIGH = Lengths.of([1, 2] * 500), Lengths.of([2, 3] * 500)


@dataclass
class Paper:
    """An application on paper, whose draft comes, is refused, or does not come."""

    runs: DraftChoice = OLD
    refusal: str | None = None
    comes: bool = True
    chosen: list[str] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)
    _names: dict[str, dict[str, Any]] = field(default_factory=lambda: {"first": {}})

    def choice(self) -> DraftChoice:
        return self.runs

    def choose(self, choice: DraftChoice) -> None:
        self.runs = choice
        self.chosen.append(choice.model)
        if self.comes or choice == OLD:
            self._names = {f"{choice.model}-{next(self._number)}": {}}

    def status(self) -> dict[str, Any]:
        refused = {"x": self.refusal} if self.refusal and self.runs == NEW else {}
        return {"draft": {"replicas": {} if refused else self._names, "refused": refused}}


def trial(application: Paper, *measures: Lengths | Exception) -> Any:
    remaining = iter(measures)
    ticks = itertools.count(0, 100)

    def measure() -> Lengths:
        found = next(remaining)
        if isinstance(found, Exception):
            raise found
        return found

    return roll_out(application, NEW, measure, clock=lambda: float(next(ticks)), sleep=lambda s: None)


def test_lengths_by_hand() -> None:
    """1, 2 and 3 tokens: mean 2, variance 1, standard error sqrt(1 / 3)."""
    found = Lengths.of([1, 2, 3])
    assert (found.passes, found.tokens, found.squares) == (3, 6, 14)
    assert found.length == 2
    assert found.length_error == pytest.approx((1 / 3) ** 0.5)
    assert found + Lengths.of([1]) - Lengths.of([1]) == found
    assert Lengths().length == 0
    assert not Lengths.of([5]).length_error < 1e9


def test_of_answers() -> None:
    """A pass ends with a correction, a bonus or a plain token; the last one may be cut off by the answer's end."""
    origins: list[Any] = ["plain", "accepted", "accepted", "bonus", "accepted", "correction", "accepted"]
    assert of_results([Result(0, origins=origins), Result(1)]) == Lengths.of([1, 3, 2, 1])


def test_counts_are_those_of_replicas_that_stayed() -> None:
    before = {"a": Lengths(10, 20, 50), "gone": Lengths(5, 5, 5)}
    now = {"a": Lengths(13, 26, 64), "came": Lengths(99, 99, 99)}
    assert since(before, now) == Lengths(3, 6, 14)


def test_live_traffic_is_waited_for() -> None:
    looks = iter([(0, 0, 0), (4, 8, 20), (10, 25, 80)])

    def status() -> dict[str, Any]:
        decided, committed, squares = next(looks)
        facts = {"decided": decided, "committed": committed, "committed_squares": squares}
        return {"target": {"replicas": {"t": facts}}}

    assert live(status, 8, sleep=lambda s: None) == Lengths(10, 25, 80)
    looks = iter([(0, 0, 0), (2, 2, 2), (4, 8, 20), (7, 12, 30), (10, 25, 80)])
    assert live(status, 6, skip=3, sleep=lambda s: None) == Lengths(6, 17, 60)
    idle: dict[str, Any] = {"target": {"replicas": {"t": {}}}}
    ticks = itertools.count(0, 1000)
    with pytest.raises(UnavailableError, match="0 passes in 3600 s, 8 are needed"):
        live(lambda: idle, 8, clock=lambda: float(next(ticks)), sleep=lambda s: None)


def test_a_better_draft_stays() -> None:
    application = Paper()
    verdict = trial(application, LOW, HIGH)
    assert verdict.kept
    assert application.chosen == ["new"]
    lines = table(verdict)
    assert "1.500 ± 0.016" in lines[1]
    assert lines[-1] == "kept"


@pytest.mark.parametrize("after", [LOW, Lengths.of([1, 2] * 499 + [2, 2])])
def test_one_that_is_no_better_than_by_chance_goes(after: Lengths) -> None:
    application = Paper()
    verdict = trial(application, LOW, after)
    assert not verdict.kept
    assert application.chosen == ["new", "old"]
    assert "the old draft is back" in table(verdict)[-1]


@pytest.mark.parametrize(
    ("application", "measures", "message"),
    [
        (Paper(refusal="other tokens"), [LOW], "new cannot be used: other tokens"),
        (Paper(comes=False), [LOW], "new did not come in time"),
        (Paper(), [LOW, UnavailableError("no traffic")], "no traffic"),
    ],
)
def test_a_trial_that_fails_puts_the_old_one_back(application: Paper, measures: list[Any], message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        trial(application, *measures)
    assert application.chosen == ["new", "old"]


def test_what_is_no_trial() -> None:
    with pytest.raises(ConfigError, match="new is the draft that runs"):
        trial(Paper(NEW))
    with pytest.raises(ConfigError, match="no draft runs"):
        trial(Paper(_names={}))


def test_a_declared_application_keeps_all_else() -> None:
    file = {"name": "o", "args": {"a": 1}, "deployments": [{"name": "DraftTier", "num_replicas": 3}, {"name": "X"}]}
    found = with_user_config(file, NEW)
    assert found["args"] == {"a": 1}
    assert found["deployments"] == [
        {"name": "X"},
        {"name": "DraftTier", "num_replicas": 3, "user_config": NEW.model_dump(mode="json")},
    ]
    assert with_user_config({"name": "o"}, NEW)["deployments"][0]["name"] == "DraftTier"


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_only_the_choice_of_a_draft_leaves_the_version_as_it_is() -> None:
    from deployments.app import code_version

    config = load_config({})
    assert code_version(config.with_draft(DraftChoice(model="other", dtype="bfloat16"))) == code_version(config)
    assert code_version(load_config({"draft": {"settings": {"slots": 3}}})) != code_version(config)


# -- under Ray ---------------------------------------------------------------------------------------------------------


def emulated(acceptance: float) -> DraftChoice:
    return DraftChoice(model="emulated:reference", engine_kwargs={"agreement": {"acceptance": acceptance}})


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_draft_is_exchanged_under_streams_and_the_target_does_not_notice(
    ray_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance 0.4 to 0.8 is kept, 0.8 to 0.4 is not; eight streams see none of it, nor does the target's actor.

    The code that exchanges drafts is another version than the one that started the application. The command, with
    prompts of its own, decides the same.

    Passes wait for three draft tokens: lengths near 1 + a + a^2 + a^3, 1.6 and 2.95, over 300 passes with standard
    errors below 0.1, so that a wrong decision is ten of these away.
    """
    from deployments.runtime.local import application

    raw = {
        "name": "trial",
        "model_id": "emulated",
        "target": {
            "engine": "emulated",
            "model": "emulated:reference",
            "engine_kwargs": {"pass_ms": 5.0},
            "settings": {"lookahead": {"mode": "fixed", "maximum": 3, "wait": "bounded", "max_wait_ms": 1000}},
        },
        # No other draft could take what a draft that goes has: nothing is won by waiting for it.
        "draft": {"kind": "emulated", "drain_s": 0.2, **emulated(0.4).model_dump(mode="json")},
        "orchestrator": {"settings": {"discovery_period_s": 0.2}},
        "ingress": {"port": ray_port, "route_prefix": "/trial", "batch_folder": None},
    }
    questions = tmp_path / "questions.txt"
    questions.write_text("Who?\nWhy?\n")
    with application(load_config(raw)) as url, connect(url) as client:
        monkeypatch.setattr("deployments.app.code_version", lambda config: "changed since")
        served = ServedApplication("trial")
        prompts = [f"question {n}" for n in range(8)]
        plain = client.generate(prompts, max_tokens=60, temperature=0.0, speculation=False)
        expected = [result.tokens for result in plain]
        over = threading.Event()
        broken: list[Any] = []

        def stream(number: int) -> None:
            while not over.is_set():
                tokens = [
                    token
                    for delta in client.stream(prompts[number], max_tokens=60, temperature=0.0)
                    for token in delta.tokens
                ]
                if tokens != expected[number]:
                    broken.append(tokens)

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        try:
            status = served.status()
            targets, drafts = set(status["target"]["replicas"]), set(status["draft"]["replicas"])
            better = roll_out(served, emulated(0.8), lambda: live(served.status, 300, skip=30))
            assert better.kept
            assert better.after.length > better.before.length + 0.5
            assert served.choice() == emulated(0.8)
            worse = roll_out(served, emulated(0.4), lambda: live(served.status, 300, skip=30))
            assert not worse.kept
            assert served.choice() == emulated(0.8)
            asked = ["--application", "trial", "--prompts", str(questions), "--passes", "100", "--json"]
            weak = ["--engine-kwargs", json.dumps(emulated(0.4).engine_kwargs)]
            command = typer.Typer()
            command.command()(rollout)
            told = CliRunner().invoke(command, ["emulated:reference", *asked, *weak])
            assert told.exit_code == 1, told.exception
            assert json.loads(told.stdout)["kept"] is False
            assert served.choice() == emulated(0.8)
            status = served.status()
            assert set(status["target"]["replicas"]) == targets
            assert set(status["draft"]["replicas"]).isdisjoint(drafts)
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert broken == []


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_draft_is_exchanged_in_a_declared_application(ray_port: int) -> None:
    """As `serve deploy` runs it: the same, by the file's `user_config`."""
    from ray import serve

    raw = {
        "name": "declared",
        "model_id": "emulated",
        "target": {"engine": "emulated", "model": "emulated:reference"},
        "draft": {"kind": "emulated", **emulated(0.4).model_dump(mode="json")},
        "ingress": {"batch_folder": None},
    }
    file = {"name": "declared", "route_prefix": "/declared", "import_path": "deployments.app:build", "args": raw}
    serve.start(http_options={"port": ray_port})
    ray_internals.deploy([file], wait=True)
    try:
        served = ServedApplication("declared")
        assert served.is_declared
        for _ in range(600):  # polls for a minute at most
            if (status := served.status())["draft"]["replicas"]:
                break
            time.sleep(0.1)
        assert status["draft"]["replicas"]
        measures = iter([LOW, HIGH])
        assert roll_out(served, emulated(0.8), lambda: next(measures)).kept
        assert served.choice() == emulated(0.8)
        assert served.status()["target"]["replicas"].keys() == status["target"]["replicas"].keys()
        with pytest.raises(ConfigError, match="is the draft that runs"):
            roll_out(served, emulated(0.8), lambda: LOW)
    finally:
        serve.delete("declared")
