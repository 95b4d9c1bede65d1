"""Tokenizers that cut the same text differently, and models over them, small enough to be built here."""

from __future__ import annotations

from collections.abc import Sequence

from random_llama import random_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from actors.engines.transformers.causal_lm import CausalLM
from actors.text.codec import TextCodec


def merging(*words: str) -> TextCodec:
    """Single bytes, and merges that build up `words` from the left. Id 0 ends a text, id 1 is another special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, "<|user|>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        written = word.replace(" ", "\u0120")  # GPT-2's stand-in for a space
        for length in range(2, len(written) + 1):
            pair = written[: length - 1], written[length - 1]
            if pair not in merges:
                merges.append(pair)
                vocabulary.setdefault("".join(pair), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>"))


def pieces(*words: str) -> TextCodec:
    """SentencePiece's way: pieces with a leading mark, which every text gets, and bytes for what is not known."""
    vocabulary = {"</s>": 0, "<unk>": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)}
    for piece in ("\u2581", *(f"\u2581{word}" for word in words)):
        vocabulary[piece] = len(vocabulary)
    scores = [(piece, -float(len(vocabulary)) if len(piece) < 2 else -1.0) for piece in vocabulary]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=1, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


def said(codec: TextCodec, tokens: Sequence[int]) -> str:
    """The text of `tokens` by their bytes."""
    return b"".join(codec.piece(token) for token in tokens if not codec.is_special(token)).decode()


TARGET = merging(" the", " cat", "hello", " sat", "12")
DRAFT = merging("he", "ll", " c", " th", "at")


def module(codec: TextCodec, seed: int) -> LlamaForCausalLM:
    """A random Llama in float64."""
    return random_llama(codec.vocabulary, seed).double()


def llama(codec: TextCodec, seed: int) -> CausalLM:
    """The same, for slots."""
    return CausalLM(module(codec, seed), name=f"llama-{seed}", eos=(0,))
