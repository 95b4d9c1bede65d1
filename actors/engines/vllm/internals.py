"""Everything that leans on vLLM's internals. Tried on vLLM 0.32 (see TRIED); runs in vLLM's worker processes.

Two of vLLM's documented extension points bring it there: `worker_cls` names `MailboxWorker`, and speculative decoding
of method `custom_class` names `MailboxProposer`. Beyond them it leans on this of the V1 model runner:

- `_sample(logits, spec_decode_metadata)` decides the tokens of a pass, on every tensor-parallel rank; logits hold
  num_draft_tokens + 1 rows per request in the order of `input_batch.req_ids`, or one row without the metadata.
- `requests[id]` has `prompt_token_ids`, `sampling_params` and `output_token_ids`, the latter without this pass's.
- `discard_request_mask` marks requests whose prompt is not finished with this pass.
- `SamplerOutput.sampled_token_ids` is int32 [requests, n], -1 where there is no token, if n > 1.
- `execute_model` runs the pass and `take_draft_token_ids` what `propose` returned, one list per request.
- After each pass the engine asks its executor's `take_draft_token_ids`, which asks the first rank. That is a call to
  another process (0.8 ms on the machine where it was measured, of two cores); `MailboxExecutor` has the answer already.

`install` looks for these names, and actors/engines/vllm/startup_check.py for their meaning: it compares a few
answers with plain decoding when the engine starts.

What decides is the same code that decides for the embedded engine (algorithms/verification.py), so that every rule
and every sampling setting holds here as it does there, with speculation and without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, ModelRunnerOutput, SamplerOutput

from actors.algorithms.grammar import GrammarCompiler, GrammarMatcher
from actors.algorithms.types import Block
from actors.algorithms.verification import verify_blocks
from actors.engines.protocol import Proposal
from actors.engines.vllm.ipc import ProposalClient
from actors.engines.vllm.requests import PAYLOAD, Facts, facts
from actors.engines.vllm.worker_config import WorkerConfig
from actors.errors import EngineError, OutriderError
from actors.messages import VerificationResult

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

NOTHING = Proposal()
_DRAFTS = "outrider_drafts"
"""Where a `ModelRunnerOutput` carries a `DraftTokenIds`."""
_RUNNER_NAMES = ("_sample", "execute_model", "input_batch", "requests", "discard_request_mask", "drafter")


@dataclass(slots=True, eq=False)
class _Request:
    """A running request, as its tokens are decided."""

    facts: Facts
    prompt: Sequence[int]
    committed: Sequence[int]
    grammar: GrammarMatcher | None
    proposal: Proposal = NOTHING
    expected: int = -1
    """The position at which `proposal` begins."""
    followed: int = 0
    """Output tokens that the grammar has followed."""
    asked: bool = False
    """The mailbox was asked for drafts of it before."""


@dataclass(slots=True)
class _Pass:
    """What is known of the pass under way."""

    began: float = 0.0
    tokens: int = 0
    results: list[VerificationResult] = field(default_factory=list)
    continuing: dict[str, str] = field(default_factory=dict)
    """Sequences, by vLLM's id, that will be in the next pass with a token to decide."""


class Decider:
    """Takes the place of a model runner's `_sample`, and gathers what the exchange tells the mailbox."""

    def __init__(self, runner: Any, brief: WorkerConfig) -> None:
        self._runner, self._brief = runner, brief
        self._vllms_own = runner._sample
        self._requests: dict[str, _Request] = {}
        self._compiler: GrammarCompiler | None = None
        self._pass = _Pass()
        self._client: ProposalClient | None = None
        if get_tp_group().rank_in_group == 0:
            self._client = ProposalClient(brief.address, brief.secret, brief.patience_s)

    # -- deciding ------------------------------------------------------------------------------------------------

    def begin(self, tokens: int) -> None:
        """A pass over `tokens` tokens begins."""
        self._pass.began, self._pass.tokens = time.perf_counter(), tokens

    @torch.inference_mode()
    def sample(self, logits: Tensor, metadata: Any) -> Any:
        """Decide the tokens of a pass: logits [N, V], where each request owns its drafts' rows and one more."""
        ids = list(self._runner.input_batch.req_ids)
        if not any(self._payload(name) for name in ids):  # the start-up check compares with what vLLM decides
            return self._vllms_own(logits, metadata)
        counts = list(metadata.num_draft_tokens) if metadata is not None else [0] * len(ids)
        drafts: list[int] = metadata.draft_token_ids.tolist() if metadata is not None else []
        unfinished = self._runner.discard_request_mask.np[: len(ids)]
        rows: list[int] = []
        blocks: list[Block] = []
        deciding: list[tuple[int, str, _Request]] = []
        row = first = 0
        for i, (name, count) in enumerate(zip(ids, counts, strict=True)):
            if not unfinished[i]:
                try:
                    request = self._request(name)
                    block = self._block(name, request, drafts[first : first + count])
                except OutriderError as error:  # it ends this request, not the engine
                    self._fail(name, error)
                else:
                    blocks.append(block)
                    rows.extend(range(row, row + len(block.drafts) + 1))
                    deciding.append((i, name, request))
            row, first = row + count + 1, first + count
        kept = logits if len(rows) == logits.shape[0] else logits[rows]
        results = verify_blocks(kept, blocks, [request.grammar for _, _, request in deciding]) if blocks else []
        places = [i for i, _, _ in deciding]
        output = _sampler_output(len(ids), places, results, max(counts) + 1, logits.device)
        for (_, name, _), result in zip(deciding, results, strict=True):
            result.alternatives = ()  # vLLM hands them out with the tokens
            self._pass.results.append(result)
            if result.error is None:
                self._pass.continuing[name] = result.sequence
        return output

    def _payload(self, name: str) -> bool:
        parameters = self._runner.requests[name].sampling_params
        return PAYLOAD in (parameters.extra_args or {})

    def _request(self, name: str) -> _Request:
        if name not in self._requests:
            state = self._runner.requests[name]
            known = facts(state.sampling_params.extra_args)
            if known is None:
                raise EngineError("a request came to vLLM from elsewhere")
            tokens = state.prompt_token_ids
            committed = tokens[known.prompt :]
            grammar = self._grammar(known)
            if grammar is not None:
                grammar.advance(committed)
            self._requests[name] = _Request(known, tokens[: known.prompt], committed, grammar)
        return self._requests[name]

    def _fail(self, name: str, error: OutriderError) -> None:
        state = self._runner.requests[name]
        known = facts(state.sampling_params.extra_args)
        if known is not None:
            position = len(state.prompt_token_ids) + len(state.output_token_ids)
            self._pass.results.append(VerificationResult(known.sequence, position, (), error=error))

    def _grammar(self, known: Facts) -> GrammarMatcher | None:
        text, brief = known.sampling.grammar, self._brief
        if text is None or brief.tokenizer is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler(brief.tokenizer, brief.vocabulary, brief.eos)
        return self._compiler.matcher(text)

    def _block(self, name: str, request: _Request, drafts: list[int]) -> Block:
        output: Sequence[int] = self._runner.requests[name].output_token_ids
        if request.grammar is not None:
            request.grammar.advance(output[request.followed :])
            request.followed = len(output)
        if request.committed:
            output = [*request.committed, *output]
        position = len(request.prompt) + len(output)
        proposal = request.proposal
        # vLLM may have cut the proposal short. What it put in by itself (padding near the end) is no draft.
        ours = request.expected == position and tuple(drafts) == proposal.tokens[: len(drafts)]
        return Block(
            sampling=request.facts.sampling,
            seed=request.facts.seed,
            position=position,
            prompt=request.prompt,
            output=output,
            drafts=drafts if ours else (),
            supports=proposal.supports[: len(drafts)] if ours else (),
            rule=self._brief.rule,
            eos=self._brief.eos,
            sequence=request.facts.sequence,
        )

    # -- proposing -----------------------------------------------------------------------------------------------

    def propose(self) -> list[list[int]]:
        """Draft tokens per request of the batch, for the next pass. Called on every rank, after `sample`."""
        ended, self._pass = self._pass, _Pass()
        proposals: dict[str, Proposal] = {}
        if self._client is not None:
            proposals = self._client.exchange(
                ended.results,
                tuple(ended.continuing.values()),
                tokens=ended.tokens,
                rows=len(ended.results),
                seconds=time.perf_counter() - ended.began,
                patient=self._any_new(ended),
            )
        proposals = get_tp_group().broadcast_object(proposals, src=0)
        self._forget()
        answer: list[list[int]] = []
        for name in self._runner.input_batch.req_ids:
            sequence, request = ended.continuing.get(name), self._requests.get(name)
            if sequence is None or request is None:
                answer.append([])
                continue
            state = self._runner.requests[name]
            request.proposal = proposals.get(sequence, NOTHING)
            request.expected = len(state.prompt_token_ids) + len(state.output_token_ids)
            answer.append(list(request.proposal.tokens))
        return answer

    def _any_new(self, ended: _Pass) -> bool:
        """Is there a sequence that may have drafts, and was in no pass before?"""
        found = False
        for name in ended.continuing:
            request = self._requests[name]
            if not request.asked:
                request.asked = True
                found = found or request.facts.sampling.speculation
        return found

    def _forget(self) -> None:
        for name in [name for name in self._requests if name not in self._runner.requests]:
            del self._requests[name]

    def connected(self, timeout_s: float) -> bool:
        """Is the mailbox reached (on the rank that asks)?"""
        return self._client is None or self._client.connected(timeout_s)


def _sampler_output(
    size: int, places: list[int], results: list[VerificationResult], width: int, device: torch.device
) -> SamplerOutput:
    """Results as vLLM takes them: int32 [size, width], -1 for no token, with log-probabilities where asked for."""
    width = max(width, 2)  # a single column is taken as it is, and could not say that there is no token
    lines = [[-1] * width for _ in range(size)]
    for i, result in zip(places, results, strict=True):
        if result.error is None:
            lines[i][: len(result.tokens)] = result.tokens
    sampled = torch.tensor(lines, dtype=torch.int32)
    return SamplerOutput(sampled.to(device), _logprobs(size, places, results, width, device))


def _logprobs(
    size: int, places: list[int], results: list[VerificationResult], width: int, device: torch.device
) -> LogprobsTensors | None:
    """[size * width, most + 1]: the chosen token first, then the best ones."""
    most = max((len(a.top) for result in results for a in result.alternatives), default=-1)
    if most < 0:
        return None
    tokens = torch.zeros(size * width, most + 1, dtype=torch.int32)
    values = torch.full((size * width, most + 1), -torch.inf)
    for i, result in zip(places, results, strict=True):
        for n, (token, found) in enumerate(zip(result.tokens, result.alternatives, strict=False)):
            line = [(token, found.logprob), *found.top]
            tokens[i * width + n, : len(line)] = torch.tensor([t for t, _ in line], dtype=torch.int32)
            values[i * width + n, : len(line)] = torch.tensor([v for _, v in line])
    ranks = torch.zeros(size * width, dtype=torch.int64)
    return LogprobsTensors(tokens.to(device), values.to(device), ranks.to(device))


def install(runner: Any, brief: WorkerConfig) -> Decider:
    """Let a `Decider` decide for `runner`. Raises EngineError when vLLM's internals are not where they were."""
    missing = [name for name in _RUNNER_NAMES if not hasattr(runner, name)]
    if missing:
        raise EngineError(f"vLLM's model runner has no {', '.join(missing)}: this version has other internals")
    if not isinstance(runner.drafter, MailboxProposer):
        raise EngineError("vLLM did not take the mailbox as its proposer")
    decider = Decider(runner, brief)
    run = runner.execute_model

    def execute_model(scheduled: Any, *rest: Any, **options: Any) -> Any:
        decider.begin(scheduled.total_num_scheduled_tokens)
        return run(scheduled, *rest, **options)

    runner._sample = decider.sample
    runner.execute_model = execute_model
    runner.drafter.decider = decider
    return decider


class MailboxProposer:
    """vLLM's proposer (speculative method `custom_class`): drafts come from the mailbox."""

    def __init__(self, vllm_config: Any) -> None:
        self.decider: Decider | None = None

    def load_model(self, model: Any) -> None:
        """There is none: the draft runs elsewhere."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """One list of draft tokens per request; all are empty before a decider is installed."""
        return self.decider.propose() if self.decider is not None else [[] for _ in sampled_token_ids]


class MailboxWorker(PlatformWorker):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's worker for this platform, whose tokens are decided here. Told what it needs by `take_brief`."""

    def sample_tokens(self, *arguments: Any, **options: Any) -> Any:
        """End the pass; its drafts for the next one travel with its tokens, for `MailboxExecutor`."""
        output = super().sample_tokens(*arguments, **options)
        if type(output) is ModelRunnerOutput:
            setattr(output, _DRAFTS, self.take_draft_token_ids())
        return output

    def take_brief(self, fields: dict[str, Any]) -> bool:
        """Called once over vLLM's RPC, on every rank, with a `WorkerConfig`. Returns whether the mailbox is reached."""
        brief = WorkerConfig.of(fields)
        decider = install(self.model_runner, brief)
        return decider.connected(10.0)


class MailboxExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor for ranks in processes of this machine, which knows the drafts when it is asked for them."""

    _drafts: DraftTokenIds | None = None

    def sample_tokens(self, *arguments: Any, **options: Any) -> Any:
        """End the pass on every rank."""
        output = super().sample_tokens(*arguments, **options)
        self._drafts = getattr(output, _DRAFTS, None)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for the next pass; the worker is asked where they did not come with the tokens of the last one."""
        drafts, self._drafts = self._drafts, None
        return drafts if drafts is not None else super().take_draft_token_ids()
