"""How often the demo draft's most likely token is the target's, on prompts that it was not trained on.

python -m cluster.models.demo_draft [--prompts N] [--tokens N] [--dtype TYPE] [--layers FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from actors.engines.transformers.causal_lm import CausalLM

HELD_PROMPTS = Path(__file__).with_name("held-prompts.json")


def greedy_answer(model: CausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens of plain greedy decoding, end of text included in the running."""
    from actors.engines.transformers.slots import SlotRow

    cache = model.cache(slots=1, context=len(prompt) + count)
    tokens, answer = list(prompt), list[int]()
    while len(answer) < count:
        start = len(prompt) + len(answer) - 1 if answer else 0
        logits = model.run(cache, [SlotRow(0, tokens[start:], start)], [len(tokens) - start - 1])
        tokens.append(int(logits.argmax()))
        answer.append(tokens[-1])
    return answer


def agreements(model: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> list[bool]:
    """Whether the draft's most likely token is the answer's, at each position along the answer."""
    from actors.engines.transformers.slots import SlotRow

    tokens = [*prompt, *answer]
    cache = model.cache(slots=1, context=len(tokens))
    keep = range(len(prompt) - 1, len(tokens) - 1)
    guesses = model.run(cache, [SlotRow(0, tokens, 0)], keep).argmax(-1)
    ids = guesses if model.vocabulary is None else model.vocabulary[guesses]
    return [guess == token for guess, token in zip(ids.tolist(), answer, strict=True)]


def main() -> None:
    """Print the agreement."""
    from cluster.models import references, weights

    parser = argparse.ArgumentParser(description="Greedy agreement of the demo draft with the demo target.")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the draft's weights")
    parser.add_argument("--layers", type=Path, help="draft layers to use in place of the packaged ones (safetensors)")
    options = parser.parse_args()
    tokenizer = references.load_tokenizer(references.DEMO_TARGET)
    target = weights.load_model(references.DEMO_TARGET)
    draft = weights.load_model(references.DEMO_DRAFT, dtype=options.dtype, draft_layers=options.layers)
    found: list[bool] = []
    for question in json.loads(HELD_PROMPTS.read_text(encoding="utf-8"))[: options.prompts]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        answer = greedy_answer(target, prompt, options.tokens)
        ends = [i for i, token in enumerate(answer) if token in target.eos]
        found.extend(agreements(draft, prompt, answer[: ends[0] + 1] if ends else answer))
    share = sum(found) / len(found)
    error = (share * (1 - share) / len(found)) ** 0.5
    print(f"{share:.4f} ± {error:.4f} of {len(found)} greedy tokens agree (torch threads: {torch.get_num_threads()})")


if __name__ == "__main__":
    main()
