"""A causal language model of transformers, run over slots.

Any model with full attention whose code calls the attention function that is registered for it (transformers'
"attention backend" support) will do. What it must be is found out by one pass of a single token, not from its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actors.engines.transformers.fast_linear import optimise_for_small_blocks
from actors.engines.transformers.fixed_shapes import BLOCK, CELLS, TileLayout, require_fixed_shapes, tiles_of
from actors.engines.transformers.graphs import Compile, GraphedPasses, Record, StaticLayout
from actors.engines.transformers.slots import (
    ATTENTION,
    Attending,
    HeadShape,
    Layout,
    Move,
    Probe,
    SlotCache,
    SlotRow,
    slot_attention,
)
from actors.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CausalLM:
    """A model's weights, ready to run flat passes over the slots of a cache.

    vocabulary: int64 [V'], sorted target token ids; restricts the output head to these rows. None keeps all.
    packed: on a CPU, pack float32 weights as this type for passes of a few tokens (see fast_linear.py); None leaves
        the model's own layers.
    record: how small passes are recorded to be replayed (see graphs.py); None runs every pass anew.
    compile: what makes such a pass faster before it is recorded; None takes it as it is.
    deterministic: run passes of one fixed shape, so that a token's logits do not depend on what else is in its pass
        (see fixed_shapes.py), with as many threads as torch has now.
    Raises ConfigError when the model does not attend in a way that slots can give, or cannot be deterministic.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        name: str,
        eos: Sequence[int] = (),
        fingerprint: str = "",
        vocabulary: Tensor | None = None,
        packed: torch.dtype | None = torch.float32,
        record: Record | None = None,
        compile: Compile | None = None,
        deterministic: bool = False,
    ) -> None:
        self.module: Any = module.eval().requires_grad_(False)
        self._record, self._compile = record, compile
        self._graphs: dict[int, GraphedPasses] = {}
        self.name, self.eos, self.fingerprint = name, tuple(eos), fingerprint
        parameter = next(module.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocabulary_size = int(self.module.get_input_embeddings().num_embeddings)
        self.vocabulary = None if vocabulary is None else vocabulary.to(self.device, torch.int64)
        if self.vocabulary is not None:
            self._restrict_head(self.vocabulary)
        self.deterministic = deterministic
        self._threads = torch.get_num_threads()
        if deterministic:
            require_fixed_shapes(self.module, name, self.device)
        _use_slot_attention(self.module, name)
        if self.device.type == "cpu" and packed is not None:
            optimise_for_small_blocks(self.module, weights=packed)

    def cache(self, *, slots: int, context: int, scratch: int = 0) -> SlotCache:
        """A cache that fits this model. Raises ConfigError when its attention or its context does not allow it."""
        longest = getattr(self.module.config, "max_position_embeddings", None)
        if longest is not None and context > longest:
            raise ConfigError(f"context {context} is above the {longest} positions that {self.name} was made for")
        shapes = self._probe(context)
        if self.deterministic:
            if scratch:
                raise ConfigError("a deterministic model computes continuations of a prefix, no trees")
            context += -context % CELLS
        return SlotCache(shapes, slots=slots, context=context, scratch=scratch, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def run(self, cache: SlotCache, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        """One pass. Returns the logits [len(keep), V'] after the tokens `keep`, counted through all rows."""
        if self.deterministic:
            return self._run_tiles(cache, rows, keep)
        if self._record is not None:
            graphed = self._graphed(cache).run(rows, keep)
            if graphed is not None:
                return graphed
        layout = Layout(cache, rows)
        kept = torch.tensor(keep, dtype=torch.long, device=self.device)
        logits: Tensor = self._call(layout.tokens, layout.positions, kept, layout)[0]
        return logits

    def move(self, cache: SlotCache, moves: Sequence[Move]) -> None:
        """Copy tree nodes that came true into the prefixes of their slots."""
        cache.move(moves)

    def _run_tiles(self, cache: SlotCache, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        if torch.get_num_threads() != self._threads:  # each thread of Python's has a number of its own
            torch.set_num_threads(self._threads)
        wanted = set(keep)
        parts: list[Tensor] = []
        found: dict[int, int] = {}
        for segments in tiles_of(rows):
            layout = TileLayout(cache, segments)
            places: list[int] = []
            for segment in segments:
                for i in range(len(segment.tokens)):
                    if segment.first + i in wanted:
                        found[segment.first + i] = len(found)
                        places.append(segment.place + i)
            # The head, too, runs over all places, or over none.
            heads = torch.arange(BLOCK if places else 0)
            logits = self._call(layout.tokens, layout.positions, heads, layout)[0]
            parts.append(logits[places])
        return torch.cat(parts)[[found[i] for i in keep]]

    def _graphed(self, cache: SlotCache) -> GraphedPasses:
        if id(cache) not in self._graphs:

            def call(tokens: Tensor, positions: Tensor, layout: StaticLayout) -> Tensor:
                every = torch.arange(tokens.shape[1], device=self.device)
                return self._call(tokens, positions, every, layout)[0]

            compiled = call if self._compile is None else self._compile(call)
            self._graphs[id(cache)] = GraphedPasses(compiled, cache, self._record)
        return self._graphs[id(cache)]

    def _call(self, tokens: Tensor, positions: Tensor, keep: Tensor, layout: Attending) -> Tensor:
        answer = self.module(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, layout=layout
        )
        logits: Tensor = answer.logits
        return logits

    @torch.inference_mode()
    def _probe(self, context: int) -> list[HeadShape]:
        probe = Probe(context)
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            self._call(zero, zero, zero[0], probe)
        except TypeError as error:
            raise ConfigError(f"{self.name} cannot run in slots: {error}") from error
        layers = int(self.module.config.get_text_config().num_hidden_layers)
        missing = sorted(set(range(layers)) - set(probe.shapes))
        if missing:
            raise ConfigError(
                f"layers {missing} of {self.name} do not use full attention (they are recurrent, or of a kind of "
                "their own); the transformers engine needs full attention in every layer: use the vllm engine"
            )
        return [probe.shapes[layer] for layer in range(layers)]

    def _restrict_head(self, vocabulary: Tensor) -> None:
        full = self.module.get_output_embeddings()
        if int(vocabulary.max()) >= full.weight.shape[0] or int(vocabulary.min()) < 0:
            raise ConfigError(f"the draft vocabulary of {self.name} holds ids outside its own vocabulary")
        head = torch.nn.Linear(full.weight.shape[1], len(vocabulary), bias=full.bias is not None, device="meta")
        head.weight = torch.nn.Parameter(full.weight[vocabulary].clone(), requires_grad=False)
        if full.bias is not None:
            head.bias = torch.nn.Parameter(full.bias[vocabulary].clone(), requires_grad=False)
        self.module.set_output_embeddings(head)


def _use_slot_attention(module: Any, name: str) -> None:
    from transformers import AttentionInterface

    if not module.is_backend_compatible():
        raise ConfigError(
            f"{name} ({type(module).__name__}) does not let its attention be replaced; use the vllm engine for it"
        )
    AttentionInterface.register(ATTENTION, slot_attention)
    module.set_attn_implementation(ATTENTION)
