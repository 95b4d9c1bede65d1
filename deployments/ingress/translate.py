"""From a checked request body to what the orchestrator generates. The only place where the two vocabularies meet."""

from __future__ import annotations

import secrets
from typing import Any

from pydantic import ValidationError

from actors.errors import InvalidSettingError, PromptTooLongError, UnknownModelError
from actors.messages import GenerationRequest, extend_key
from actors.settings import SamplingSettings
from deployments.ingress.grammars.structured_output import response_grammar, structured_grammar, tool_grammar
from deployments.ingress.schema import ChatRequest, Common, CompletionRequest
from deployments.ingress.service import Codec, Served

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when absent, as OpenAI has it; a chat answer may fill the context."""
_SEEDS = 1 << 63


def check_model(name: str | None, served: Served) -> None:
    """Raises UnknownModelError unless `name` is the served model, or absent."""
    if name is not None and name != served.model_id:
        raise UnknownModelError(f"The model `{name}` does not exist; this server has `{served.model_id}`", "model")


def derived_seed(seed: int, choice: int) -> int:
    """Seed of the i-th choice: the first is the seed's own, so that n does not change it."""
    return seed if choice == 0 else extend_key(seed, choice) % _SEEDS


def completion_requests(body: CompletionRequest, id_: str, codec: Codec, served: Served) -> list[GenerationRequest]:
    """One request per prompt and candidate, in the order of the choices. Raises RequestError."""
    check_model(body.model, served)
    grammar = _one_grammar(
        response_grammar(body.response_format, served.closed_schemas),
        structured_grammar(body.structured_outputs, served.closed_schemas),
    )
    sampling = _sampling(body, codec, body.length_limit() or COMPLETION_TOKENS, grammar, served.context)
    candidates = body.best_of or body.n
    if candidates > body.n and sampling.logprobs is None:  # the best is told by its log-probability
        sampling = sampling.model_copy(update={"logprobs": 0})
    return [
        GenerationRequest(
            id=f"{id_}-{i * candidates + j}",
            sampling=_reseeded(sampling, j),
            text=prompt if isinstance(prompt, str) else None,
            tokens=None if isinstance(prompt, str) else tuple(prompt),
            timeout_s=body.timeout_s,
            priority=body.priority,
        )
        for i, prompt in enumerate(body.prompt)
        for j in range(candidates)
    ]


def chat_requests(body: ChatRequest, id_: str, codec: Codec, served: Served) -> list[GenerationRequest]:
    """One request per choice. Raises RequestError."""
    check_model(body.model, served)
    check_messages(len(body.messages), served)
    grammar = _one_grammar(
        response_grammar(body.response_format, served.closed_schemas),
        structured_grammar(body.structured_outputs, served.closed_schemas),
        tool_grammar(body.tools, body.tool_choice, served.closed_schemas),
    )
    sampling = _sampling(body, codec, body.length_limit() or served.context, grammar, served.context)
    tools = None if body.tool_choice == "none" else tuple(body.tools)
    return [
        GenerationRequest(
            id=f"{id_}-{j}",
            sampling=_reseeded(sampling, j),
            messages=tuple(message.plain() for message in body.messages),
            tools=tools or None,
            timeout_s=body.timeout_s,
            priority=body.priority,
        )
        for j in range(body.n)
    ]


def _sampling(body: Common, codec: Codec, max_tokens: int, grammar: str | None, context: int) -> SamplingSettings:
    values: dict[str, Any] = {
        name: getattr(body, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "min_tokens",
            "ignore_eos",
            "skip_special_tokens",
        )
        if name in body.model_fields_set  # the orchestrator knows what the model gives to those that do not say it
    }
    speculation = body.speculation
    try:
        return SamplingSettings(
            **values,
            seed=secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS,
            max_tokens=max_tokens,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
            bad_words=_bad_words(body.bad_words, codec),
            logprobs=body.wanted_logprobs(),
            grammar=grammar,
            prediction=_prediction(body.prediction, codec, context),
            speculation=speculation is None or speculation.enabled,
            margins=speculation is not None and speculation.tokens,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidSettingError(f"{param}: {message}" if param else message, param) from error


def _reseeded(sampling: SamplingSettings, choice: int) -> SamplingSettings:
    return sampling.model_copy(update={"seed": derived_seed(sampling.seed or 0, choice)})


def _bad_words(words: list[str], codec: Codec) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, at the start of a text and after a space."""
    forms = [codec.encode(form, special=False) for word in words for form in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(form for form in forms if form))


def _prediction(prediction: dict[str, Any] | None, codec: Codec, context: int) -> tuple[int, ...]:
    """OpenAI's Predicted Outputs: {type: 'content', content: text or text parts}."""
    if prediction is None:
        return ()
    content = prediction.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if prediction.get("type") != "content" or not isinstance(content, str):
        raise InvalidSettingError("prediction must be {type: 'content', content: text}", "prediction")
    try:
        return codec.encode(content, context, special=False)
    except PromptTooLongError as error:
        raise InvalidSettingError(f"the prediction is longer than any answer: {error.message}", "prediction") from error


def check_messages(count: int, served: Served) -> None:
    """Raises PromptTooLongError for more messages than there are tokens; no template has to be filled to see that."""
    if count > served.context:
        raise PromptTooLongError(
            f"{count} messages, of a token at least each, do not fit into {served.context} tokens", "messages"
        )


def grammar_param(body: Common) -> str:
    """The parameter that a request's grammar comes from."""
    if body.structured_outputs:
        return "structured_outputs"
    return "response_format" if (body.response_format or {}).get("type", "text") != "text" else "tools"


def _one_grammar(*grammars: str | None) -> str | None:
    given = [grammar for grammar in grammars if grammar is not None]
    if len(given) > 1:
        raise InvalidSettingError(
            "response_format, structured_outputs and a forced tool_choice exclude each other", "response_format"
        )
    return given[0] if given else None
