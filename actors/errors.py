"""The one tree of errors. Every message is written for the person who will read it.

    OutriderError                  anything this project raises on purpose
    ├── ConfigError                the deployment cannot be built as configured (exit code 2)
    │   ├── ModelNotFoundError     a model reference that leads nowhere
    │   └── ModelMismatchError     draft and target do not fit together
    ├── RequestError               the request cannot be served as asked (HTTP 4xx)
    │   ├── InvalidSettingError    a sampling setting out of range, or not supported here
    │   ├── PromptError            an empty prompt, too long a prompt, or an id outside the vocabulary
    │   └── UnknownModelError      a model name that is not served here
    ├── OverloadedError            no room now; try again later (HTTP 429)
    ├── UnavailableError           no replica can serve this now (HTTP 503)
    │   └── IngressLostError       the process that was answering over HTTP was lost; asking again is safe
    ├── DeadlineError              the request's time limit passed (HTTP 504)
    └── EngineError                a replica failed in the middle of its work (HTTP 500)

All are picklable, because they cross actor boundaries.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of the tree. `param` names the setting at fault, where there is one; `code` is OpenAI's error code."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ConfigError(OutriderError):
    """The deployment cannot be built as configured."""


class ModelNotFoundError(ConfigError):
    """A model reference that leads nowhere."""


class ModelMismatchError(ConfigError):
    """Draft and target do not fit together, for example because their vocabularies differ."""


class RequestError(OutriderError):
    """The request cannot be served as asked."""

    status = 400
    type = "invalid_request_error"


class InvalidSettingError(RequestError):
    """A sampling setting is out of range, or not supported by this deployment."""

    code = "invalid_value"


class PromptError(RequestError):
    """The prompt is empty, longer than the context, or holds an id outside the vocabulary."""

    code = "invalid_prompt"


class PromptTooLongError(PromptError):
    """The prompt leaves no room in the context for an answer."""

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """The named model is not served here."""

    status = 404
    code = "model_not_found"


class OverloadedError(OutriderError):
    """The queue is full. `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after = 1.0


class UnavailableError(OutriderError):
    """No replica can serve the request now."""

    status = 503
    type = "service_unavailable"
    code = "unavailable"
    retry_after = 2.0


class IngressLostError(UnavailableError):
    """The process that was answering over HTTP was lost. Nothing is kept of the answer; asking again is safe."""

    code = "ingress_lost"
    retry_after = 1.0


class DeadlineError(OutriderError):
    """The request's time limit passed."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineError(OutriderError):
    """A replica failed in the middle of its work."""

    code = "engine_error"
