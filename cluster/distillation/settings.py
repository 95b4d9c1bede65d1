"""What a distillation run is asked to do."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from actors.settings import Finite, Settings


class DistillSettings(Settings):
    """A run. Everything here is part of its identity: a run is resumed with the same values only."""

    kind: Literal["layers", "hidden_states"] = "layers"
    """layers: a causal LM cut out of the target. hidden_states: one layer that reads the target's hidden states."""
    layers: Annotated[int, Field(ge=1)] = 4
    layers_from: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers of the target to start from; None takes the first ones and the last."""
    feature_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """hidden_states: what enters these layers of the target is fused; None takes an early, a middle and a late one."""
    start: str | None = None
    """A draft to begin from in place of layers of the target; it must have as many layers as are asked for."""
    vocabulary: Annotated[int, Field(ge=2)] | Literal["start"] | None = 12288
    """Most token ids that the draft may propose (the likeliest in the target's answers); None keeps all, `start` has
    those of the draft to begin from."""
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Time for sampling and training together, evaluation not included."""
    sampling_share: Annotated[float, Field(ge=0, lt=1)] = 0.4
    """Of the minutes, for sampling; what it leaves goes to training. 0 trains on recorded answers alone."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Sampling ends at this many answer tokens, if the time has not run out before."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Training ends at this many steps, if the time has not run out before."""

    answer: Annotated[int, Field(ge=1)] = 160
    """Longest answer, in tokens."""
    context: Annotated[int, Field(ge=8)] = 1024
    """Longest prompt and answer together."""
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0, le=2)], ...], Field(min_length=1)] = (
        0.0,
        0.0,
        0.3,
        0.8,
        0.8,
        1.0,
    )
    """An answer is sampled at one of these, drawn evenly."""
    top: Annotated[int, Field(ge=1, le=256)] = 24
    """Log-probabilities stored per position; training knows no others."""
    slots: Annotated[int, Field(ge=1, le=4096)] = 96
    """Answers sampled side by side."""
    shard: Annotated[int, Field(ge=1)] = 192
    """Answers per file of the sample store."""

    batch: Annotated[int, Field(ge=1)] = 24
    """Answers per training step."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    acceptance_weight: Annotated[Finite, Field(ge=0)] = 1.0
    """Weight of 1 - sum min(p, q) next to the cross-entropy."""
    unrolled: Annotated[int, Field(ge=1, le=16)] = 4
    """hidden_states: depths trained; the first reads the target's features, the others the draft's own."""
    depth_weight: Annotated[float, Field(gt=0, le=1)] = 0.8
    """hidden_states: a depth counts so much of the one before it (SpecForge's figure)."""
    missing: Annotated[float, Field(ge=0, le=1)] = 0.15
    """hidden_states: share of the texts whose features begin at a random place only."""
    kept_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """hidden_states: memory for hidden states of the target that are not computed again for each pass over the texts;
    a token takes six bytes per unit of the target's width."""
    warmup: Annotated[int, Field(ge=1)] = 20
    """Steps until the learning rate is reached, or a tenth of the training if that is sooner."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The learning rate falls to zero over this last share of training."""
    window: Annotated[int, Field(ge=1)] = 8
    """Shards held in memory at once."""

    held: Annotated[int, Field(ge=1)] = 64
    """Prompts kept from training for evaluation, at most a fifth of them."""
    evaluation_prompts: Annotated[int, Field(ge=1)] = 16
    evaluation_tokens: Annotated[int, Field(ge=1)] = 48
    lookahead: Annotated[int, Field(ge=1, le=64)] = 4
    """Draft tokens per pass, when acceptance is measured."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic in sampling and training. Weights in training are float32 always."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kind == "hidden_states" and (self.layers != 1 or self.layers_from or self.start):
            raise ValueError("a draft of kind hidden_states has one layer, and begins from neither layers nor a draft")
        if self.start is not None and self.layers_from is not None:
            raise ValueError("a draft begins from `start` or from `layers_from`, not from both")
        if self.start is None and self.vocabulary == "start":
            raise ValueError("vocabulary is that of `start`, but there is none")
        if self.layers_from is not None and len(self.layers_from) != self.layers:
            raise ValueError(f"layers_from names {len(self.layers_from)} layers, but layers is {self.layers}")
        if self.answer >= self.context:
            raise ValueError(f"answer ({self.answer}) leaves no room for a prompt in context ({self.context})")
        return self
