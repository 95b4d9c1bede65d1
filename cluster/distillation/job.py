"""One distillation: what it is about, where its work lies, and whom it tells how far it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actors.errors import ConfigError
from cluster.distillation.files import write_whole
from cluster.distillation.settings import DistillSettings
from cluster.distillation.store import SampleStore

Stage = Literal["sampling", "training", "evaluation", "export"]


@dataclass(frozen=True, slots=True)
class Target:
    """The model to make a draft for, and what its draft must carry along.

    module: a causal LM of transformers. reference: what the user calls it. save_tokenizer: writes the tokenizer's
    files into a folder. fingerprint: of the vocabulary.
    """

    module: Any
    reference: str
    eos: tuple[int, ...]
    save_tokenizer: Callable[[Path], object]
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. done: of its stage, 0 to 1. seconds_left: of sampling and training, as planned; in
    evaluation, of evaluation. rate: tokens per second. note: something to be told once."""

    stage: Stage
    done: float
    seconds_left: float = 0.0
    tokens: int = 0
    rate: float | None = None
    loss: float | None = None
    agreement: float | None = None
    note: str = ""


Report = Callable[[Progress], None]


@dataclass(slots=True)
class State:
    """What is kept in state.json next to the samples and the training state."""

    identity: dict[str, Any]
    sampling_seconds: float = 0.0
    training_seconds: float = 0.0
    imported: bool = False
    sampled: bool = False
    trained: bool = False


@dataclass(slots=True)
class Job:
    """A run's working folder and its state, for the stages to share."""

    target: Target
    settings: DistillSettings
    folder: Path
    state: State
    report: Report
    clock: Callable[[], float] = time.monotonic
    store: SampleStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = SampleStore(self.folder / "samples")

    @property
    def sampling_budget(self) -> float:
        """Seconds."""
        return self.settings.minutes * 60 * self.settings.sampling_share

    @property
    def training_budget(self) -> float:
        """Seconds."""
        return self.settings.minutes * 60 - self.sampling_budget

    def save(self) -> None:
        """Write the state down."""
        _write(self.folder, self.state)

    def tell(self, stage: Stage, done: float, left: float = 0.0, **figures: Any) -> None:
        """Report progress; figures: more fields of it."""
        self.report(Progress(stage, min(done, 1.0), max(left, 0.0), **figures))


def open_state(folder: Path, identity: dict[str, Any]) -> State:
    """The state of an unfinished run in `folder`, or a new one.

    Raises ConfigError if it is damaged, or of a run that differs in `identity`, naming what differs.
    """
    state = look_at_state(folder)
    if state is None:
        state = State(identity)
        _write(folder, state)
        return state
    if changed := _differences(state.identity, identity):
        raise ConfigError(
            f"{folder} holds an unfinished run with other {', '.join(changed)}: give the same command again "
            "to finish it, delete it to start afresh, or choose another place"
        )
    return state


def look_at_state(folder: Path) -> State | None:
    """The state of the run in `folder`; None if there is none. Raises ConfigError if it is damaged."""
    file = folder / "state.json"
    if not file.exists():
        return None
    try:
        return State(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: delete {folder} to start afresh") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """`folder`, which is made if need be, for this run alone. Raises ConfigError if another run has it."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
            yield
    except Timeout as error:
        raise ConfigError(f"another run is working in {folder}") from error


def _write(folder: Path, state: State) -> None:
    values = {name: getattr(state, name) for name in State.__slots__}
    write_whole(folder / "state.json", json.dumps(values, indent=1).encode())


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = [name for name in new if name != "settings" and old.get(name) != new[name]]
    before, after = old.get("settings", {}), new["settings"]
    return [*names, *(name for name in after if before.get(name) != after[name])]
