"""Packs a draft that `outrider distill` made for the demo target into the committed form, int8 and below 15 MB.

    python -m cluster.models.demo_draft.pack DIR [--out FOLDER]

Writes draft.safetensors and info.json, whole or not at all. Embedding and head are the demo target's and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from actors.errors import ConfigError, OutriderError
from cluster.distillation.files import write_whole
from cluster.models import references, weights
from cluster.models.demo_draft import quantised

MOST_BYTES = 15_000_000
_AROUND = ("embed_tokens.weight", "lm_head.weight")
_FACTS = (
    "start",
    "layers_from",
    "sampled_tokens",
    "steps",
    "trained_positions",
    "sampling_seconds",
    "training_seconds",
    "greedy_agreement",
    "settings",
)


def pack(draft: Path, out: Path) -> int:
    """Returns the bytes of draft.safetensors. Raises ConfigError if `draft` is for another target, or too large."""
    from safetensors.torch import save

    card = _card(draft)
    module, vocabulary = weights.load_draft(str(draft), torch.float32)
    layers = int(module.config.num_hidden_layers)
    if layers != weights.DEMO_DRAFT_LAYERS:
        raise ConfigError(f"the demo draft has {weights.DEMO_DRAFT_LAYERS} layers, {draft} has {layers}")
    packed = quantised.quantise({n: w for n, w in module.state_dict().items() if not n.endswith(_AROUND)})
    size = int(module.config.vocab_size)
    packed[quantised.VOCABULARY] = (torch.arange(size) if vocabulary is None else vocabulary).to(torch.int32)
    data = save(packed)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{draft} takes {len(data):,} bytes, packed; at most {MOST_BYTES:,} are committed")
    write_whole(out / quantised.WEIGHTS.name, data)
    write_whole(out / "info.json", (json.dumps(_info(out, card), indent=2) + "\n").encode())
    return len(data)


def _card(draft: Path) -> dict[str, Any]:
    try:
        card: dict[str, Any] = json.loads((draft / "card.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{draft} has no card.json that can be read, so `outrider distill` did not make it"
        ) from error
    if card.get("target") != references.DEMO_TARGET:
        raise ConfigError(f"{draft} is a draft for {card.get('target')}, not for {references.DEMO_TARGET}")
    return card


def _info(out: Path, card: dict[str, Any]) -> dict[str, Any]:
    """What the demo draft went through, the rounds before this one included if it began from the demo draft."""
    before = out / "info.json"
    former: dict[str, Any] = {"started_from_layers": card["layers_from"], "training": []}
    if card["start"] == references.DEMO_DRAFT and before.is_file():
        former = json.loads(before.read_text(encoding="utf-8"))
    return {
        **former,
        "target": references.DEMO_TARGET,
        "licence": "Apache-2.0",
        "layers": weights.DEMO_DRAFT_LAYERS,
        "vocabulary": card["draft_vocabulary"],
        "format": "int8 per output row, float32 scales",
        "training": [*former["training"], {name: card[name] for name in _FACTS}],
    }


def main() -> None:
    """Pack, and say how large it is."""
    parser = argparse.ArgumentParser(description="Pack a draft into the demo draft's form.")
    parser.add_argument("draft", type=Path, help="what `outrider distill demo:smollm2-135m` made")
    parser.add_argument("--out", type=Path, default=quantised.WEIGHTS.parent, help="folder; default: the committed one")
    options = parser.parse_args()
    try:
        print(f"{pack(options.draft, options.out):,} bytes in {options.out / quantised.WEIGHTS.name}")
    except OutriderError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
