"""A draft that reads the target's hidden states and runs ahead of them.

Each cell of a slot holds the feature that its token's child is to read: the target's, once it was told with a commit,
until then the draft's own. So a draft that was told nothing, too late or wrongly still drafts; it only agrees less.
True features that come for positions computed without them make these positions be computed again, in the next pass.
Nodes of the tree stay as they are: they were guesses, and are corrected when they are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from actors.engines.protocol import ModelCard
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.transformers.fast_linear import optimise_for_small_blocks
from actors.engines.transformers.feature_layer import Attend, FeatureModel
from actors.engines.transformers.features import from_bytes, projection_name
from actors.engines.transformers.slots import HeadShape, Layout, SlotCache, SlotRow, cells_of
from actors.errors import ConfigError
from actors.features import Features
from actors.messages import OpenSequence
from actors.settings import DraftSettings


class FeatureCache(SlotCache):
    """Keys, values and features per cell. features: [slots, cells, E]; told: bool [slots, cells], the target's own."""

    def __init__(self, shape: HeadShape, width: int, **options: object) -> None:
        super().__init__([shape], **options)  # type: ignore[arg-type]
        keys = self.keys[0]
        self.features = keys.new_zeros(keys.shape[0], keys.shape[2], width)
        self.told = torch.zeros(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)

    @property
    def size_in_bytes(self) -> int:
        """See SlotCache."""
        return super().size_in_bytes + self.features.nbytes + self.told.nbytes

    def forget(self, slot: int) -> None:
        """Another sequence takes the slot."""
        self.features[slot] = 0
        self.told[slot] = False

    def adopt(self, slot: int, cells: Sequence[int], position: int) -> None:
        """See SlotCache.adopt; features move along."""
        super().adopt(slot, cells, position)
        start = self.scratch + position
        source = torch.tensor(cells, device=self.features.device)
        self.features[slot, start : start + len(cells)] = self.features[slot].index_select(0, source)
        self.told[slot, start : start + len(cells)] = False

    def tell(self, slot: int, position: int, features: Tensor) -> int | None:
        """Take the target's features [N, E] from `position` on. Returns the first position that reads a new one."""
        cells = slice(self.scratch + position, self.scratch + position + len(features))
        fresh = (~self.told[slot, cells]).nonzero()
        if not len(fresh):
            return None
        self.features[slot, cells] = features.to(self.features.device, self.features.dtype)
        self.told[slot, cells] = True
        return position + int(fresh[0]) + 1


class FeatureLM:
    """Runs a FeatureModel over slots, as causal_lm.CausalLM does a whole model.

    vocabulary: int64 [V'], target token ids of the head's rows, or None for all. packed: see CausalLM.
    """

    def __init__(
        self,
        module: FeatureModel,
        *,
        name: str,
        eos: Sequence[int] = (),
        fingerprint: str = "",
        vocabulary: Tensor | None = None,
        packed: torch.dtype | None = torch.float32,
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.name, self.eos, self.fingerprint = name, tuple(eos), fingerprint
        self.vocabulary_size, self.width = int(module.embedding.shape[0]), module.shape.width
        self.features = projection_name(module.shape.layers, module.fc.weight)
        self.dtype, self.device = module.norm.weight.dtype, module.norm.weight.device
        self.vocabulary = None if vocabulary is None else vocabulary.to(self.device, torch.int64)
        head = nn.Linear(module.head.shape[1], module.head.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(module.head.to(self.dtype), requires_grad=False)
        self._head = nn.Sequential(module.norm, head)
        if self.device.type == "cpu" and packed is not None:
            optimise_for_small_blocks(module.midlayer, weights=packed)
            optimise_for_small_blocks(self._head, weights=packed)

    def cache(self, *, slots: int, context: int, scratch: int = 0) -> FeatureCache:
        """A cache that fits. Raises ConfigError for a context that the layer was not made for."""
        layer = self.module.shape.layer
        longest = layer.max_position_embeddings
        if context > longest:
            raise ConfigError(f"context {context} is above the {longest} positions that {self.name} was made for")
        shape = HeadShape(int(layer.num_key_value_heads), int(layer.head_dim), int(layer.head_dim))
        return FeatureCache(
            shape, self.width, slots=slots, context=context, scratch=scratch, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def run(self, cache: FeatureCache, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        """One pass. Returns the logits [len(keep), V'] after the tokens `keep`, counted through all rows."""
        layout = Layout(cache, rows)
        slots = torch.tensor([row.slot for row in rows for _ in row.tokens], device=self.device)
        cells = torch.tensor([cell for row in rows for cell in cells_of(row, cache.scratch)], device=self.device)
        before = torch.tensor([cell for row in rows for cell in _before(row, cache.scratch)], device=self.device)
        read = cache.features[slots, before.clamp_min(0)] * (before >= 0)[:, None]  # [T, E]
        own = self.module(layout.tokens, layout.positions, read[None], _attending(layout))[0]  # [T, E]
        told = cache.told[slots, cells][:, None]
        cache.features[slots, cells] = torch.where(told, cache.features[slots, cells], own)
        kept = torch.tensor(keep, dtype=torch.long, device=self.device)
        logits: Tensor = self._head(own[kept])
        return logits


class FeatureDraft(TransformersDraft):
    """Implements protocol.DraftModel and protocol.FeatureReader."""

    def __init__(self, model: FeatureLM, settings: DraftSettings) -> None:
        super().__init__(model, settings)  # type: ignore[arg-type]  # of CausalLM, it calls what FeatureLM has
        self._features = model
        self.told = 0
        """Messages with features that were taken."""
        self.dropped = 0
        """Those with features that were of no use: of another model, width, type or place, or not finite."""

    def card(self) -> ModelCard:
        return replace(super().card(), features=self._features.features)

    def open(self, opening: OpenSequence) -> None:
        """See TransformersDraft.open."""
        super().open(opening)
        self._feature_cache.forget(self._sessions[opening.sequence].slot)

    def read_features(self, sequence: str, features: Features) -> None:
        """Take the target's features of committed positions. What is of no use is dropped and counted."""
        session = self._sessions.get(sequence)
        if session is None:
            return
        fits = features.model == self._features.features and features.width == self._features.width
        found = from_bytes(features) if fits else None
        if found is None or not 0 <= features.position <= len(session.tokens) - len(found):
            self.dropped += 1
            return
        self.told += 1
        first = self._feature_cache.tell(session.slot, features.position, found)
        if first is not None and first < session.cached:
            session.stale = first if session.stale is None else min(first, session.stale)

    def feature_counts(self) -> dict[str, float]:
        """See protocol.FeatureReader."""
        return {"features_read": float(self.told), "features_dropped": float(self.dropped)}

    @property
    def _feature_cache(self) -> FeatureCache:
        assert isinstance(self._cache, FeatureCache)  # FeatureLM made it
        return self._cache


def _before(row: SlotRow, scratch: int) -> list[int]:
    """The cell of the token before each; -1 where there is none, or where this same pass computes it anew."""
    if not row.paths:
        return [scratch + position - 1 if position else -1 for position in row.positions()]
    own = {path[-1] for path in row.paths}
    parents = [path[-2] if len(path) > 1 else scratch + row.start - 1 for path in row.paths]
    return [-1 if parent in own else parent for parent in parents]


def _attending(layout: Layout) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return layout.attend(0, query, key, value, None)

    return attend
