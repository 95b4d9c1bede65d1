"""The finished draft on disk: an ordinary checkpoint, the ids that it may propose, and a card."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cluster.distillation.evaluation import Acceptance, Agreement
from cluster.distillation.feature_student import FeatureStudent
from cluster.distillation.files import whole_folder, write_whole
from cluster.distillation.settings import DistillSettings
from cluster.distillation.student import Student, save_bytes, vocabulary_bytes, vocabulary_file
from cluster.models import feature_checkpoint

if TYPE_CHECKING:
    from cluster.distillation.job import Target


def card(
    *,
    target: Target,
    student: Student | FeatureStudent,
    settings: DistillSettings,
    sampled_tokens: int,
    steps: int,
    positions: int,
    seconds: tuple[float, float],
    agreement: Agreement,
    acceptance: Sequence[Acceptance],
    held: int,
) -> dict[str, Any]:
    """How the draft was made and what it is worth, as plain values."""
    return {
        "target": target.reference,
        "vocabulary_fingerprint": target.fingerprint,
        "kind": settings.kind,
        "layers_from": None if student.layers_from is None else list(student.layers_from),
        "start": settings.start,
        "trained_weights": student.trained_weights,
        "draft_vocabulary": len(student.head),
        "tied_head": student.is_tied,
        "sampled_tokens": sampled_tokens,
        "steps": steps,
        "trained_positions": positions,
        "sampling_seconds": round(seconds[0], 1),
        "training_seconds": round(seconds[1], 1),
        "held_prompts": held,
        "greedy_agreement": {
            "share": round(agreement.share, 4),
            "error": round(agreement.error, 4),
            "tokens": agreement.tokens,
        },
        "acceptance": [row.as_json() for row in acceptance],
        "settings": settings.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def write(folder: Path, student: Student | FeatureStudent, target: Target, card: dict[str, Any]) -> None:
    """Write the checkpoint, whole or not at all. Raises ConfigError if `folder` is taken, OSError if it cannot be."""
    with whole_folder(folder) as part:
        if isinstance(student, FeatureStudent):
            feature_checkpoint.save(part, student.module, student.vocabulary, target.module.dtype)
            _write_around(part, folder.name, target, card)
            return
        config = student.module.config
        config.dtype = target.module.dtype
        config.save_pretrained(part)
        generation = getattr(target.module, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(part)
        write_whole(part / "model.safetensors", save_bytes(student, target.module.dtype))
        if student.vocabulary is not None:
            write_whole(vocabulary_file(part), vocabulary_bytes(student.vocabulary))
        _write_around(part, folder.name, target, card)


def _write_around(part: Path, name: str, target: Target, card: dict[str, Any]) -> None:
    target.save_tokenizer(part)
    write_whole(part / "card.json", (json.dumps(card, indent=2) + "\n").encode())
    write_whole(part / "README.md", readme(name, card).encode())


def readme(name: str, card: dict[str, Any]) -> str:
    """The card as prose."""
    rows = "\n".join(
        f"| {row['rule']} | {row['temperature']:g} | {row['rate']:.3f} ± {row['rate_error']:.3f} "
        f"| {row['length']:.2f} ± {row['length_error']:.2f} |"
        for row in card["acceptance"]
    )
    agreed = card["greedy_agreement"]
    start = f"The draft `{card['start']}` as a start (what it was trained on before, this card does not know)"
    if card["kind"] == "hidden_states":
        start = "One layer that reads the target's hidden states (EAGLE-3's form); serve it as draft.kind hidden_states"
    elif card["layers_from"] is not None:
        start = f"Layers {', '.join(map(str, card['layers_from']))} of the target as a start"
    minutes = (card["sampling_seconds"] + card["training_seconds"]) / 60
    return f"""# {name}

A draft for speculative decoding with `{card["target"]}`, made by `outrider distill`. It is no model to talk to: it
guesses what its target would say.

- {start}, {card["trained_weights"]:,} weights trained; embedding and
  output head are the target's own, frozen. It proposes {card["draft_vocabulary"]:,} token ids.
- {card["sampled_tokens"]:,} tokens sampled from the target, with its best log-probabilities; {card["steps"]:,} steps
  over {card["trained_positions"]:,} positions; {minutes:.0f} minutes in all.
- On {card["held_prompts"]} prompts kept from training, its likeliest token is the target's greedy token in
  {agreed["share"]:.3f} ± {agreed["error"]:.3f} of {agreed["tokens"]:,} places.

| rule | temperature | acceptance per tested token | tokens per pass, {card["settings"]["lookahead"]} drafted in turn |
|---|---|---|---|
{rows}

The license of the target applies. Settings and versions are in `card.json`.
"""
