"""Settings of the parts in this folder, validated where they enter. Unknown keys are refused everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Rule = Literal["coupled", "rejection", "block", "typical"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """Immutable, and strict about keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def problems(error: ValidationError, known: Mapping[str, Any], whole: str) -> list[str]:
    """What is wrong, a line for each: where, and what; of a key that is no setting, which one was probably meant.

    known: a dump of valid settings, for their names. whole: where what is wrong has no place of its own.
    """
    lines = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        place, said = problem["loc"], problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            said = _unknown(place, known)
        lines.append(f"{'.'.join(map(str, place)) or whole}: {said}")
    return lines


def _unknown(place: tuple[int | str, ...], known: Any) -> str:
    for part in place[:-1]:
        known = known.get(part) if isinstance(known, Mapping) else None
    near = get_close_matches(str(place[-1]), known if isinstance(known, Mapping) else (), 1)
    return "there is no such setting" + (f"; did you mean {near[0]}?" if near else "")


class SamplingSettings(Settings):
    """How the target's logits become a token; the meaning of each field is OpenAI's or vLLM's.

    Everything here is applied at each position of a block, with the history that position would have had.
    """

    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """0 and -1 keep every token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: dict[Token, Annotated[float, Field(ge=-100, le=100)]] = {}
    allowed_token_ids: tuple[Token, ...] | None = None
    bad_words: tuple[tuple[Token, ...], ...] = ()
    """Token sequences that never appear in the answer."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 256
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[Token, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """False: special tokens of the answer are part of its text, and of what stop strings are looked for in."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """None: none. 0: of the chosen tokens. n: and of the n best alternatives."""
    grammar: str | None = None
    """A grammar in llguidance's serialised form (made from response_format)."""
    prediction: tuple[Token, ...] = ()
    """Text the client expects (OpenAI's Predicted Outputs), as token ids: a source for lookup drafts."""
    speculation: bool = True
    """False: plain decoding for this request."""
    margins: bool = False
    """Report the distance between the two best scores at each token (to detect near-ties), and rejected drafts."""

    @property
    def greedy(self) -> bool:
        """Temperatures this small leave no room for noise in float32; they mean the most likely token."""
        return self.temperature < 1e-5

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self


class LookaheadSettings(Settings):
    """How many draft tokens of each sequence a pass verifies."""

    mode: Literal["adaptive", "fixed", "scheduled"] = "adaptive"
    """adaptive: by measured costs and calibrated confidences. scheduled: by batch size. fixed: `maximum`."""
    maximum: Annotated[int, Field(ge=0, le=64)] = 8
    """Upper bound on a path's length in every mode, and the value itself in fixed mode. 0 turns speculation off."""
    tree: Annotated[int, Field(ge=0, le=512)] = 64
    """Most draft tokens of a sequence verified in one pass where alternatives are verified too: adaptive mode, the
    coupled rule, and an engine that can. No more than `maximum`: the best path alone."""
    schedule: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]] = {}
    """Scheduled mode: batch size from which on -> lookahead."""
    wait: Literal["adaptive", "never", "bounded", "full"] = "adaptive"
    """bounded: for the first draft token of each sequence. full: for the whole lookahead, which makes draft and
    target take turns."""
    max_wait_ms: Annotated[float, Field(ge=0, le=60_000, allow_inf_nan=False)] | None = None
    """A pass is never held longer than this for a draft that is due. None: no longer than a usual pass takes."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if (self.mode == "scheduled") != bool(self.schedule):
            raise ValueError("lookahead.schedule is needed in scheduled mode, and only there")
        return self


class TreeSettings(Settings):
    """The outcome tree that a draft grows per sequence."""

    width: Annotated[int, Field(ge=1, le=256)] = 8
    """Most nodes expanded in one draft step, over all sequences."""
    branching: Annotated[int, Field(ge=1, le=32)] = 4
    """Children kept per node: the sampled one and its alternatives. 1 is a chain."""
    depth: Annotated[int, Field(ge=1, le=64)] = 16
    """How far past the committed prefix the tree may reach."""
    nodes: Annotated[int, Field(ge=1, le=4096)] = 128
    """Most nodes held per sequence."""
    min_reach: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Nodes less likely to be needed than this are not expanded."""


class TargetSettings(Settings):
    """One target replica's engine, whatever its kind."""

    slots: Annotated[int, Field(ge=1, le=4096)] = 16
    """Sequences running at once; each owns one preallocated KV slot."""
    context: Annotated[int, Field(ge=8)] = 2048
    """Positions per slot: prompt and answer together."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 256
    """Most prompt tokens in one pass, over all sequences, so that a long prompt does not stop the others."""
    queue: Annotated[int, Field(ge=0)] = 256
    """Sequences that may wait for a slot; one more is refused."""
    lookahead: LookaheadSettings = LookaheadSettings()
    rule: Rule = "coupled"
    """The acceptance rule; a deployment sets it once, at its top."""


class DraftSettings(Settings):
    """One draft replica's engine, whatever its kind."""

    slots: Annotated[int, Field(ge=1, le=4096)] = 32
    """Sequences followed at once; each owns one preallocated KV slot."""
    context: Annotated[int, Field(ge=8)] = 2048
    """Positions per slot; at least the target's."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 256
    """Most prompt tokens in one step, over all sequences."""
    tree: TreeSettings = TreeSettings()
    rule: Rule = "coupled"
    """The acceptance rule; a deployment sets it once, at its top."""
    support: Annotated[int, Field(ge=1, le=256)] = 32
    """Ids of q sent with each draft token under the probabilistic rules."""


class MemorySettings(Settings):
    """What drafts of kind `suffix` remember, per draft replica."""

    shared: bool = False
    """Look up every tenant's text for every tenant. Off: a tenant is served from its own text alone. On, whoever sends
    requests can guess what others were told by how fast the same text comes to them: for deployments whose users trust
    each other."""
    tokens: Annotated[int, Field(ge=1)] = 1_000_000
    """Most tokens of answers held, over all tenants; the oldest answers of whoever holds most make room."""
    answers: Annotated[int, Field(ge=1)] = 10_000
    """Most answers held, likewise."""


class OrchestratorSettings(Settings):
    """The orchestrator's patience."""

    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """A request that takes longer ends with an error."""
    discovery_period_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 1.0
    """How often the tiers are asked for their replicas."""
    stall_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """A target with work that sends no verdict for this long is taken for dead."""

    unavailable_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long a sequence waits for a target when there is none."""
