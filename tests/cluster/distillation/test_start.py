"""A draft that begins from another draft, and is evaluated on prompts that were named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_targets import VOCABULARY, llama, prompts, settings, target
from transformers import AutoModelForCausalLM

from actors.errors import ConfigError, PromptError
from cluster.distillation.job import Progress
from cluster.distillation.run import distill
from cluster.distillation.settings import DistillSettings
from cluster.distillation.start import Start, continue_student
from cluster.distillation.store import Sample, SampleStore

LAYERS = 3


def a_start(seed: int = 5, **shape: Any) -> Start:
    """Of three layers, whatever the settings' default is."""
    return Start(llama(seed, layers=LAYERS, **shape), "first", torch.arange(0, VOCABULARY, 2))


def started(**changes: Any) -> DistillSettings:
    return settings(**{"start": "first", "layers": LAYERS, "vocabulary": "start", **changes})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return found


def recorded(prompt: tuple[int, ...]) -> Sample:
    """An answer as a recorder without alternatives has it."""
    answer = torch.tensor([7, 8, 9], dtype=torch.int32)
    return Sample(torch.tensor(prompt, dtype=torch.int32), answer, answer[:, None], torch.zeros(3, 1).half())


def test_the_layers_are_the_starts_and_what_is_around_them_the_targets() -> None:
    module, start = llama(), a_start()
    own, begun = module.state_dict(), start.module.state_dict()
    for name, weight in continue_student(module, start, start.vocabulary).module.state_dict().items():
        source = own if name in ("model.embed_tokens.weight", "lm_head.weight") else begun
        assert torch.equal(weight, source[name]), name


def test_a_start_of_a_tied_draft_fits_a_target_that_is_not() -> None:
    module = llama(tied=False)
    student = continue_student(module, a_start())
    assert not student.is_tied
    assert torch.equal(student.module.lm_head.weight, module.lm_head.weight)


def test_a_whole_run_keeps_number_of_layers_and_vocabulary(tmp_path: Path) -> None:
    start = a_start()
    card = distill(target(), prompts(), tmp_path / "draft", started(max_steps=1, learning_rate=1e-12), start=start)
    assert card["start"] == "first"
    assert card["layers_from"] is None
    assert card["draft_vocabulary"] == (VOCABULARY + 1) // 2
    found = weights_of(tmp_path / "draft")
    name = "model.layers.2.mlp.down_proj.weight"
    torch.testing.assert_close(found[name], start.module.state_dict()[name])
    assert not any(name.startswith("model.layers.3") for name in found)
    assert "The draft `first` as a start" in (tmp_path / "draft" / "README.md").read_text()


def test_another_vocabulary_can_be_asked_for(tmp_path: Path) -> None:
    card = distill(target(), prompts(), tmp_path / "draft", started(vocabulary=48, max_steps=1), start=a_start())
    assert card["draft_vocabulary"] == 48


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        (a_start(), {"layers": 2}, "first has 3 layers, not 2"),
        (
            Start(llama(layers=LAYERS, hidden=64), "wide"),
            {},
            r"wide is no draft for this target: its embedding has shape \[61, 64\], the target's \[61, 32\]",
        ),
        (None, {}, "go together"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, start: Start | None, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        distill(target(), prompts(), tmp_path / "draft", started(**changes), start=start)
    assert not (tmp_path / "draft.partial").exists()


def test_a_vocabulary_of_a_start_needs_one() -> None:
    with pytest.raises(ValueError, match="there is none"):
        settings(vocabulary="start")
    with pytest.raises(ValueError, match="not from both"):
        started(layers_from=(0, 1, 2))


def test_a_run_does_not_go_on_with_another_start(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(target(), prompts(), tmp_path / "draft", started(), start=a_start(), report=stop)
    with pytest.raises(ConfigError, match="unfinished run with other weights of the start"):
        distill(target(), prompts(), tmp_path / "draft", started(), start=a_start(6))


def test_held_prompts_are_not_trained_on_wherever_they_come_from(tmp_path: Path) -> None:
    asked = prompts()
    held = [asked[0], asked[1], (5, 5, 5, 5)]
    seen: set[tuple[int, ...]] = set()

    def look(progress: Progress) -> None:
        if progress.stage == "training":
            store = SampleStore(tmp_path / "draft.partial" / "samples")
            seen.update(tuple(sample.prompt.tolist()) for sample in store.samples())

    traffic = [recorded(held[2]), recorded(asked[5]), recorded((9, 9, 9))]
    card = distill(
        target(),
        asked,
        tmp_path / "draft",
        settings(max_tokens=2000, max_steps=2),
        held=held,
        traffic=traffic,
        report=look,
    )
    assert card["held_prompts"] == 3
    assert seen.isdisjoint(held)
    assert seen >= {*asked[2:], (9, 9, 9)}


def test_recorded_answers_alone_are_enough(tmp_path: Path) -> None:
    asked = prompts()
    traffic = [recorded(prompt) for prompt in asked]
    card = distill(
        target(), asked, tmp_path / "draft", settings(sampling_share=0, max_steps=2), held=asked[:4], traffic=traffic
    )
    assert card["sampled_tokens"] == 3 * (len(asked) - 4)
    assert card["sampling_seconds"] == 0
    with pytest.raises(ConfigError, match="there must be recorded answers"):
        distill(target(), asked, tmp_path / "none", settings(sampling_share=0))


def test_a_prompt_is_left_on_either_side(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="at least one prompt to learn from"):
        distill(target(), prompts(4), tmp_path / "draft", settings(), held=prompts(4))
    with pytest.raises(PromptError, match="another one to evaluate with"):
        distill(target(), prompts(4), tmp_path / "draft", settings(), held=[])


def test_what_comes_out_is_a_start_for_the_next(tmp_path: Path) -> None:
    """The first loss of the second run is that of a trained draft: 0.1 nats below the first run's, on like answers."""
    losses: list[float] = []

    def note(progress: Progress) -> None:
        if progress.stage == "training" and progress.loss is not None:
            losses.append(progress.loss)

    asked, size = prompts(200), {"max_tokens": 4000, "max_steps": 60, "held": 8, "vocabulary": None}
    distill(target(), asked, tmp_path / "one", settings(**size), report=note)
    first, losses = losses[0], []
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    distill(target(), asked, tmp_path / "two", settings(**size, start="one"), start=Start(module, "one"), report=note)
    assert losses[0] < first - 0.1
