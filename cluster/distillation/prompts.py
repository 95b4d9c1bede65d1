"""Reading prompts: what the target is asked, as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.errors import ConfigError, OutriderError, PromptError

Ids = tuple[int, ...]


class Codec(Protocol):
    """The part of text.TextCodec that is needed here."""

    @property
    def vocabulary(self) -> int: ...

    def encode(self, text: str, limit: int | None = None, special: bool = True) -> Ids: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        limit: int | None = None,
    ) -> Ids: ...


def read_prompts(path: Path, codec: Codec, limit: int, *, chat: bool) -> list[Ids]:
    """The prompts of a file, each once, in order.

    A `.json` file holds a list, a `.jsonl` file one value per line, any other file one prompt per line. A value is a
    string, {"prompt": string}, {"messages": [...]} or {"tokens": [ids]}. A string is one message of a user if `chat`,
    plain text otherwise. limit: most tokens per prompt.

    Raises ConfigError if the file cannot be read, PromptError naming the place of a prompt that is empty or too long.
    """
    prompts: dict[Ids, None] = {}
    for place, value in _values(path):
        try:
            ids = _encode(value, codec, limit, chat)
        except OutriderError as error:
            raise PromptError(f"{path}, {place}: {error}") from error
        prompts[ids] = None
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return list(prompts)


def split(prompts: Sequence[Ids], held: int) -> tuple[list[Ids], list[Ids]]:
    """(training, held out): at most `held` prompts and a fifth of them, picked by a hash of their ids.

    A prompt keeps its side when others come or go as far as the numbers allow. Raises PromptError for less than two.
    """
    if len(prompts) < 2:
        raise PromptError("at least two prompts are needed: one to learn from, and one to evaluate with")
    count = max(1, min(held, len(prompts) // 5))
    chosen = set(sorted(prompts, key=_digest)[:count])
    return [p for p in prompts if p not in chosen], [p for p in prompts if p in chosen]


def without(prompts: Sequence[Ids], held: Sequence[Ids]) -> list[Ids]:
    """`prompts` but for those in `held`. Raises PromptError if either is empty then: there is nothing to go by."""
    chosen = set(held)
    left = [p for p in prompts if p not in chosen]
    if not left or not held:
        raise PromptError("at least one prompt to learn from is needed, and another one to evaluate with")
    return left


def digest(prompts: Sequence[Ids]) -> str:
    """Names a list of prompts."""
    return hashlib.sha256(b"".join(map(_digest, prompts))).hexdigest()


def _digest(ids: Ids) -> bytes:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).digest()


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompts in {path} are not UTF-8 text") from error
    if path.suffix == ".json":
        values = _parse(text, path, "the file")
        if not isinstance(values, list):
            raise ConfigError(f"{path} must hold a list of prompts")
        for number, value in enumerate(values, 1):
            yield f"entry {number}", value
        return
    # Not splitlines: that also cuts at characters such as U+2028, which are legal within a line.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            plain = line.rstrip("\r")
            yield f"line {number}", _parse(plain, path, f"line {number}") if path.suffix == ".jsonl" else plain


def _parse(text: str, path: Path, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, {place}, is not JSON: {error.msg}") from error


def _encode(value: Any, codec: Codec, limit: int, chat: bool) -> Ids:
    ids = _ids(value, codec, limit, chat)
    if not ids:
        raise PromptError("the prompt is empty")
    if len(ids) > limit:  # a codec looks at the number of characters alone
        raise PromptError(f"the prompt has {len(ids)} tokens; at most {limit} fit")
    return ids


def _ids(value: Any, codec: Codec, limit: int, chat: bool) -> Ids:
    match value:
        case {"tokens": [*ids]}:
            if not all(isinstance(i, int) and 0 <= i < codec.vocabulary for i in ids):
                raise PromptError(f"token ids must be whole numbers below {codec.vocabulary}")
            return tuple(ids)
        case {"messages": [*messages]}:
            if not all(isinstance(m, dict) for m in messages):
                raise PromptError("messages must be a list of objects")
            return codec.encode_chat(messages, limit=limit)
        case str() | {"prompt": str()}:
            text = value if isinstance(value, str) else value["prompt"]
            if not text.strip():
                raise PromptError("the prompt is empty")
            if chat:
                return codec.encode_chat([{"role": "user", "content": text}], limit=limit)
            return codec.encode(text, limit=limit)
        case _:
            raise PromptError('a prompt is a string, {"prompt": ...}, {"messages": [...]} or {"tokens": [...]}')
