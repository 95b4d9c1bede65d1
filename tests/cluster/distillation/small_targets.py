"""Tiny targets and prompts for tests of distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from random_llama import random_llama
from transformers import LlamaForCausalLM

from cluster.distillation.job import Target
from cluster.distillation.prompts import Ids
from cluster.distillation.settings import DistillSettings

VOCABULARY = 61
EOS = 2


def llama(
    seed: int = 0, *, tied: bool = True, layers: int = 4, hidden: int = 32, sharpness: float = 6.0
) -> LlamaForCausalLM:
    """Random weights. sharpness: factor on the final norm, so that there is something to agree on."""
    model = random_llama(
        VOCABULARY,
        seed,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.15,
        tie_word_embeddings=tied,
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpness)
    return model


def target(module: Any = None) -> Target:
    """With a stand-in for a tokenizer's files."""

    def save_tokenizer(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")

    return Target(module or llama(), "tiny", (EOS,), save_tokenizer, "print")


def prompts(count: int = 40, seed: int = 3) -> list[Ids]:
    """Different ones of three to eight tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Ids:
        length = int(torch.randint(3, 9, (1,), generator=generator))
        return tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())

    return list(dict.fromkeys(draw() for _ in range(count)))


def settings(**changes: Any) -> DistillSettings:
    """A run of a second or two, ended by counts and never by the clock."""
    values: dict[str, Any] = {
        "layers": 2,
        "vocabulary": 48,
        "minutes": 1e6,
        "max_tokens": 600,
        "max_steps": 20,
        "answer": 16,
        "context": 32,
        "slots": 8,
        "shard": 24,
        "batch": 16,
        "warmup": 4,
        "window": 2,
        "top": 8,
        "held": 8,
        "evaluation_prompts": 2,
        "evaluation_tokens": 4,
        "lookahead": 2,
    }
    return DistillSettings(**{**values, **changes})


def checkpoint(folder: Path, *, fast: bool = True, template: bool = True) -> Path:
    """A target on disk, with a tokenizer of the letters and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<unk>": 0, "<s>": 1, "</s>": EOS} | {c: i + 3 for i, c in enumerate("abcdefghijklmnopqrstuvwxyzĠ.?")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([bytewise, pre_tokenizers.Split("", "isolated")])
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    if template:
        wrapped.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    llama().save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder
