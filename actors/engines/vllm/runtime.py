"""vLLM as its actor holds it: the engine, and the exchange over which its first rank asks for drafts.

Built, connected and checked in one go, so that what comes out either speculates rightly or says that it does not.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.ipc import Answer, PassAnswerer, PassEnd, ProposalServer
from actors.engines.vllm.plan import VllmPlan
from actors.engines.vllm.startup_check import check
from actors.engines.vllm.worker_config import WorkerConfig
from actors.errors import ConfigError, EngineError
from actors.settings import TargetSettings
from actors.transport.socket import node_address

logger = logging.getLogger(__name__)

GRACE_S = 0.05
"""What the first rank waits for an answer beyond the longest hold."""


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What a vLLM target is made of.

    tokenizer: JSON of the tokenizer, for grammars. spread: the ranks may be on several nodes (vLLM's Ray executor).
    plain_if_incompatible: when the start-up check fails, decode without speculation instead of refusing to start.
    tolerance: distance between two best scores that counts as a near-tie in the start-up check, in units of logits.
    """

    name: str
    plan: VllmPlan
    vocabulary: int
    eos: tuple[int, ...] = ()
    fingerprint: str = ""
    tokenizer: str | None = None
    spread: bool = False
    plain_if_incompatible: bool = False
    tolerance: float = 1e-3


class VllmRuntime:
    """Starts vLLM's processes; `close` ends them.

    exchange: answers the passes. wake: see VllmEngine. tokenizer: what vLLM's workers make grammars with, or None.
    Raises ConfigError when vLLM cannot be started, or its internals have moved and the model does not prefer plain
    decoding to none; nothing is left running then.
    """

    def __init__(
        self,
        model: VllmModel,
        settings: TargetSettings,
        exchange: PassAnswerer,
        tokenizer: str | None,
        wake: Callable[[], None],
    ) -> None:
        self._model, self._settings, self._tokenizer = model, settings, tokenizer
        self._answering = exchange
        self._server: ProposalServer | None = None
        self._engine: VllmEngine | None = None
        self.speculates = model.plan.lookahead is not None
        """False where vLLM decodes by itself: as planned, or because the start-up check failed."""
        try:
            self._build(exchange, wake)
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> VllmEngine:
        """The engine, between building and `close`."""
        assert self._engine is not None
        return self._engine

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead; None while it lives, or was closed."""
        return self._engine.failure if self._engine is not None else None

    def close(self) -> None:
        """End the exchange and vLLM's processes."""
        self.lose_mailbox()
        self._server = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def lose_mailbox(self) -> None:
        """Close the exchange alone: vLLM goes on without drafts."""
        if self._server is not None:
            self._server.close()

    def _build(self, exchange: PassAnswerer, wake: Callable[[], None]) -> None:
        model = self._model
        self._engine = VllmEngine(model.plan, wake)
        size = int(self._engine.config.model_config.get_vocab_size())
        if size != model.vocabulary:
            raise ConfigError(f"vLLM's {model.name} has {size} token ids, its checkpoint says {model.vocabulary}")
        if not self.speculates:
            return
        try:
            self._connect(self._engine, exchange.longest_hold_s + GRACE_S)
            check(self._engine, self._answer_with, model, self._settings)
        except EngineError as error:
            if not model.plain_if_incompatible:
                raise ConfigError(
                    f"vLLM's internals are not as they were, so drafts cannot be verified: {error}", "target.engine"
                ) from error
            logger.error("DECODING WITHOUT SPECULATION AND WITHOUT COUPLED NOISE: %s", error)
            self.close()
            self.speculates = False
            self._engine = VllmEngine(dataclasses.replace(model.plan, lookahead=None), wake)
        self._answer_with(exchange)

    def _connect(self, engine: VllmEngine, patience_s: float) -> None:
        model = self._model
        server = ProposalServer(self._answer, node_address() if model.spread else None)
        self._server = server
        brief = WorkerConfig(
            address=server.address,
            secret=server.secret,
            patience_s=patience_s,
            rule=self._settings.rule,
            eos=model.eos,
            vocabulary=model.vocabulary,
            tokenizer=self._tokenizer,
        )
        try:
            reached = engine.tell_workers("take_brief", dataclasses.asdict(brief))
        except Exception as error:  # whatever vLLM makes of an error in a worker
            raise EngineError(str(error)) from error
        if not all(reached):
            raise EngineError("vLLM's first rank does not reach the mailbox")

    def _answer(self, end: PassEnd) -> Answer:
        return self._answering.answer(end)

    def _answer_with(self, exchange: PassAnswerer) -> None:
        self._answering = exchange
