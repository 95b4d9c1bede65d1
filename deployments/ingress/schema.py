"""What clients send, in OpenAI's words. Requests are checked here and nowhere else; nothing is generated here.

Types are strict (the number five is not the text "5"), null means "not given", and fields nobody knows are ignored,
as OpenAI does. Fields known to change the meaning of an answer and not supported are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from actors.errors import InvalidSettingError
from deployments.ingress.request_body import Body

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_BAD_WORDS = 256
MAX_TOOLS = 1024
MAX_TOP_K = 2**31 - 1
"""Engines count in 32 bits."""

Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SpeculationOptions(Body):
    """Extension: whether to speculate for this request, and what to say about it in the answer."""

    enabled: bool = True
    report: bool = True
    """Adds `speculation` with rule, passes and acceptance to each choice."""
    tokens: bool = False
    """Adds every token's id, text, origin and margin."""


class StreamOptions(Body):
    """OpenAI's stream_options."""

    include_usage: bool = False


class Common(Body):
    """What both generation routes take."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: list[str] = []
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Field(max_length=MAX_BAD_WORDS)
    ] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    speculation: SpeculationOptions | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    user: str | None = None

    refused: ClassVar[dict[str, str]] = {
        "use_beam_search": "answers are sampled token by token",
        "logits_processors": "the server runs no code of its clients",
        "prompt_logprobs": "only the answer's tokens carry log-probabilities",
        "truncate_prompt_tokens": "shorten the prompt before sending it",
        "prompt_embeds": "send text or token ids",
        "guided_json": "use response_format",
        "guided_regex": "use structured_outputs.regex",
        "guided_choice": "use structured_outputs.choice",
        "guided_grammar": "use structured_outputs.grammar",
        "length_penalty": "it belongs to beam search",
        "early_stopping": "it belongs to beam search",
        "return_token_ids": "speculation: {tokens: true} gives the id of every token",
        "return_tokens_as_token_ids": "speculation: {tokens: true} gives the id of every token",
        "spaces_between_special_tokens": "special tokens are joined to the text as they are",
        "add_special_tokens": "send token ids to choose the special tokens of a prompt",
        "kv_transfer_params": "this server moves no KV caches between servers",
    }
    harmless: ClassVar[dict[str, tuple[object, ...]]] = {
        "length_penalty": (1,),
        "spaces_between_special_tokens": (True, False),
        "add_special_tokens": (True,),
    }

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
        if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
        return stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not all(str(key).isdecimal() for key in value):
            raise ValueError("must map token ids to numbers")
        return {int(key): bias for key, bias in value.items()}

    @field_validator("speculation", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and self.stream_options.include_usage and not self.stream:
            raise InvalidSettingError("stream_options goes with stream: true", "stream_options")
        limit = self.length_limit()
        if limit is not None and self.min_tokens > limit:
            raise InvalidSettingError(f"min_tokens ({self.min_tokens}) is above max_tokens ({limit})", "min_tokens")
        return self

    def length_limit(self) -> int | None:
        """The most tokens the client wants, if it said so."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """None: none; 0: of the chosen tokens; more: and of so many alternatives."""
        return None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: Any
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    refused: ClassVar[dict[str, str]] = Common.refused | {"suffix": "this model continues text, it does not fill gaps"}

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        if isinstance(value, str) or (isinstance(value, list) and value and _are_ids(value)):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError("must be text, token ids, or a list of these that is not empty")
        for prompt in value:
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and _are_ids(prompt)):
                raise ValueError("must be text, token ids, or a list of these, none of them empty")
        return value

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        if len(self.prompt) * (self.best_of or self.n) > MAX_CHOICES:
            raise InvalidSettingError(f"at most {MAX_CHOICES} choices (prompts times n) in one request", "prompt")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidSettingError(f"best_of ({self.best_of}) is below n ({self.n})", "best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise InvalidSettingError("best_of above n cannot be streamed: the best is known at the end", "best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidSettingError("echo with logprobs is not supported: prompt tokens are not scored", "logprobs")
        return self

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    """One message of a conversation; what else it holds is for the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None

    @field_validator("content")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be text or a list of text parts")
        for part in value:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"only parts of type 'text' are supported, not {kind!r}")
        return value

    def plain(self) -> dict[str, object]:
        """As chat templates know it: `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(exclude_none=True), "role": role}


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    refused: ClassVar[dict[str, str]] = Common.refused | {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this model writes text",
        "web_search_options": "this server does not search the web",
        "echo": "it belongs to /v1/completions",
        "best_of": "it belongs to /v1/completions",
        "chat_template": "conversations are written by the model's own template",
        "chat_template_kwargs": "conversations are written by the model's own template",
        "documents": "put them into a message",
        "continue_final_message": "send the text so far to /v1/completions",
        "add_generation_prompt": "an answer is always a new message; use /v1/completions",
    }
    harmless: ClassVar[dict[str, tuple[object, ...]]] = Common.harmless | {
        "function_call": ("none", "auto"),
        "best_of": (1,),
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
    }

    @model_validator(mode="before")
    @classmethod
    def _text_answers(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("modalities") not in (None, ["text"]):
            raise InvalidSettingError("modalities: this model writes text only", "modalities")
        return data

    @field_validator("tools")
    @classmethod
    def _named_functions(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _checked_tools(value)

    @model_validator(mode="after")
    def _scores_fit(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidSettingError("top_logprobs goes with logprobs: true", "top_logprobs")
        return self

    def length_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """POST /tokenize: text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] = []
    add_special_tokens: bool = True

    @field_validator("tools")
    @classmethod
    def _named_functions(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _checked_tools(value)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidSettingError("send either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools of a chat, without fields that say nothing."""
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ValueError("each tool must be {type: 'function', function: {...}}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError("each function needs a name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ValueError("a function's parameters must be a JSON schema")
    return [{**tool, "function": _without_nulls(tool["function"])} for tool in tools]


def _without_nulls(function: dict[str, Any]) -> dict[str, Any]:
    """A function's description without fields that say nothing, which chat templates would print."""
    return {key: value for key, value in function.items() if value is not None}


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)
