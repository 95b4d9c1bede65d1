"""A tokenizer of single bytes and a service that recites, for tests of the doors without models and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.messages import Alternatives, Delta, GenerationRequest, Usage
from actors.text.codec import TextCodec

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|user|>{{ m.content }}<|end|>{% endfor %}"
)


def byte_codec() -> TextCodec:
    """One token per byte, plus "he" and two special ones: every character beyond ASCII is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, "<|user|>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    vocabulary["he"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return TextCodec(fast)


@dataclass
class Reciter:
    """Says `says` to every request, `block` tokens to a delta, as an orchestrator would.

    Even the i-th candidate of n differs: seeds select the i-th rotation of `says`, when it is a list.
    held: set to stop every answer after its first delta until it is released.
    """

    codec: TextCodec
    says: str | list[str] = "Hello wörld"
    block: int = 3
    refusal: Exception | None = None
    failure_after: int | None = None
    held: asyncio.Event | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    open: int = 0
    is_ready: bool = True
    tiers: dict[str, object] = field(default_factory=dict)
    """What its status tells of the tiers."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.open += 1
        try:
            async for delta in self._recite(request):
                yield delta
        finally:
            self.open -= 1

    async def _recite(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        sampling = request.sampling
        says = self.says if isinstance(self.says, str) else self.says[len(self.requests) % len(self.says)]
        script = self.codec.encode(says)
        tokens = script[: sampling.max_tokens]
        stream = self.codec.stream((), sampling.stop, sampling.min_tokens, not sampling.skip_special_tokens)
        sent = 0
        for number, start in enumerate(range(0, len(tokens), self.block)):
            if number == self.failure_after:
                raise RuntimeError("secret detail")
            block = tokens[start : start + self.block]
            pushed = stream.push(block)
            block = block[: len(pushed.texts)]
            sent += len(block)
            last = pushed.stop is not None or sent == len(tokens)
            texts = list(pushed.texts)
            if last and pushed.stop is None:
                texts[-1] += stream.flush()
            finish = None
            if last:
                finish = "length" if pushed.stop is None and len(script) > len(tokens) else "stop"
            yield Delta(
                tokens=block,
                texts=tuple(texts),
                origins=("accepted",) * (len(block) - 1) + ("correction",),
                alternatives=tuple(self._scores(token, sampling.logprobs) for token in block)
                if sampling.logprobs is not None
                else (),
                margins=(0.5,) * len(block) if sampling.margins else (),
                rejected=((),) * (len(block) - 1) + (self.codec.encode("<s>"),) if sampling.margins else (),
                finish=finish,
                stop=pushed.stop,
                usage=Usage(7, sent, 9, 6, 4, 2, 1) if last else None,
            )
            if last:
                return
            if self.held is not None:
                await self.held.wait()
            await asyncio.sleep(0)

    @staticmethod
    def _scores(token: int, wanted: int | None) -> Alternatives:
        top = tuple((other, -1.0 - other) for other in range(2, 2 + (wanted or 0)))
        return Alternatives(-token / 100, top)

    async def status(self) -> dict[str, object]:
        return {"requests": len(self.requests), **self.tiers}

    async def ready(self) -> bool:
        return self.is_ready
