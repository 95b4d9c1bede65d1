"""Tiny checkpoints for vLLM, and both tiers around them in one process: the real actors over local peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from pass_exchanges import PatientExchange, target_with
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from actors.draft.actor import DraftActor
from actors.engines.protocol import DraftModel
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.vllm.plan import VllmPlan
from actors.engines.vllm.runtime import VllmModel
from actors.messages import Delta, GenerationRequest
from actors.orchestrator.admission import Admission
from actors.orchestrator.orchestrator import Orchestrator
from actors.orchestrator.replica_pool import StaticDirectory
from actors.settings import (
    DraftSettings,
    LookaheadSettings,
    OrchestratorSettings,
    Rule,
    SamplingSettings,
    TargetSettings,
    TreeSettings,
)
from actors.target.pass_exchange import PassExchange
from actors.telemetry import MemoryRecorder
from actors.text.emulated_codec import EmulatedCodec
from actors.transport.links import LocalPeer

VOCABULARY = 288
EOS = 2
CONTEXT = 192
SLOTS = 8


def module(noise: float = 0.0) -> LlamaForCausalLM:
    """A random Llama that vLLM's CPU kernels take (heads of 32). noise: added to its weights, to make a draft of it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    return model


def checkpoint(folder: Path) -> str:
    """The model in a folder."""
    module().save_pretrained(folder)
    return str(folder)


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer for it: a token per byte, three special ones, and spare ones."""
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<spare{i}>" for i in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def settings(rule: Rule = "coupled", **changes: Any) -> TargetSettings:
    """A fixed lookahead: what is worth verifying does not depend on the machine's speed."""
    lookahead = LookaheadSettings(mode="fixed", maximum=4, wait="bounded")
    return TargetSettings(**{"slots": SLOTS, "context": CONTEXT, "lookahead": lookahead, "rule": rule} | changes)


def plan(folder: str, **changes: Any) -> VllmPlan:
    """Without compilation, which would take longer than the tests."""
    arguments = {"enforce_eager": True, **changes.pop("arguments", {})}
    return VllmPlan(
        **{
            "folder": folder,
            "dtype": "float32",
            "slots": SLOTS,
            "context": CONTEXT,
            "lookahead": 4,
            "arguments": arguments,
        }
        | changes
    )


def model(folder: str, *, plain_if_incompatible: bool = False, spread: bool = False, **changes: Any) -> VllmModel:
    """What the actor builds."""
    return VllmModel(
        "tiny",
        plan(folder, **changes),
        VOCABULARY,
        eos=(EOS,),
        plain_if_incompatible=plain_if_incompatible,
        spread=spread,
    )


CHAIN = TreeSettings(width=16, branching=1, depth=12, nodes=16, min_reach=0.0)
"""As far as a pass can commit and the next one can verify, whatever the draft thinks of it."""


def draft_settings(rule: Rule = "coupled") -> DraftSettings:
    """Slots for all that the tests ask at once, so that every sequence has drafts."""
    return DraftSettings(slots=100, context=CONTEXT, tree=CHAIN, rule=rule, support=256)


def draft(noise: float = 0.03, rule: Rule = "coupled") -> DraftModel:
    """A draft that is often right, with confidences to match."""
    return TransformersDraft(CausalLM(module(noise), name="draft", eos=(EOS,)), draft_settings(rule))


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of different length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 24, (count,), generator=generator).tolist()
    return [tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths]


def engines() -> set[int]:
    """Processes of vLLM under this one."""
    return processes("VLLM::", "spawn_main")


def processes(*names: str) -> set[int]:
    """Processes under this one whose command line holds one of the names."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if any(name in words(child) for name in names)}


def words(process: psutil.Process) -> str:
    """Its command line; nothing when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@dataclass
class Answer:
    """All of one answer."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def origins(self) -> list[str]:
        return [origin for delta in self.deltas for origin in delta.origins]

    @property
    def margins(self) -> list[float]:
        return [margin for delta in self.deltas for margin in delta.margins]

    @property
    def alternatives(self) -> list[Any]:
        return [found for delta in self.deltas for found in delta.alternatives]

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


@dataclass
class Stack:
    """A running deployment."""

    orchestrator: Orchestrator
    target: Any
    recorder: MemoryRecorder
    number: int = 0

    async def ask(self, prompt: Sequence[int], seed: int = 0, **sampling: Any) -> Answer:
        """One answer."""
        self.number += 1
        chosen = SamplingSettings(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "seed": seed} | sampling)
        request = GenerationRequest(id=f"ask-{self.number}", sampling=chosen, tokens=tuple(prompt))
        answer = Answer()
        async for delta in self.orchestrator.generate(request):
            answer.deltas.append(delta)
        return answer

    async def ask_all(self, asked: Sequence[Sequence[int]], **sampling: Any) -> list[Answer]:
        """Many answers at once; each has its own seed."""
        return await asyncio.gather(*(self.ask(prompt, seed=i, **sampling) for i, prompt in enumerate(asked)))


@asynccontextmanager
async def stack(
    chosen: VllmModel,
    make_draft: Callable[[], DraftModel] | None = draft,
    target_settings: TargetSettings | None = None,
    exchange: type[PassExchange] = PatientExchange,
) -> AsyncIterator[Stack]:
    """Both tiers, up and ready; the target's error is raised when it cannot start."""
    recorder = MemoryRecorder()
    target = target_with(exchange if make_draft is not None else PassExchange)(
        "target", lambda: chosen, target_settings or settings(), recorder
    )
    drafts: dict[str, Any] = {}
    if make_draft is not None:
        drafts["draft"] = DraftActor("draft", make_draft, draft_settings(), recorder)
    for actor in (target, *drafts.values()):
        actor.start()
    orchestrator = Orchestrator(
        targets=StaticDirectory({"target": LocalPeer(target)}),
        drafts=StaticDirectory({name: LocalPeer(actor) for name, actor in drafts.items()}),
        admission=Admission(EmulatedCodec(VOCABULARY), VOCABULARY, CONTEXT),
        settings=OrchestratorSettings(discovery_period_s=0.02),
        recorder=recorder,
    )
    try:
        await target.card()
        await orchestrator.start()
        while not orchestrator.status()["draft"]["replicas"] and drafts:
            await asyncio.sleep(0.01)
        yield Stack(orchestrator, target, recorder)
    finally:
        await orchestrator.stop()
        await target.stop()
        await asyncio.gather(*(actor.stop() for actor in drafts.values()))
