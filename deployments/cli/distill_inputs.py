"""What a distillation is given, loaded and checked: the target, prompts, recorded answers, a draft to begin from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import ConfigError, OutriderError, PromptError
from deployments.client import DEFAULT_URL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cluster.distillation.job import Target
    from cluster.distillation.prompts import Ids
    from cluster.distillation.sampler import Source
    from cluster.distillation.settings import DistillSettings
    from cluster.distillation.start import Start
    from cluster.distillation.store import Sample


def load_tokenizer(reference: str) -> PreTrainedTokenizerBase:
    """The target's. Raises ConfigError if it is a slow one."""
    from cluster.models import references

    tokenizer = references.load_tokenizer(reference)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{reference} has a slow tokenizer (no tokenizer.json), which the served draft could not share: "
            "save a fast one beside the target first (AutoTokenizer.from_pretrained(..., use_fast=True))"
        )
    return tokenizer


def load_prompts(file: Path, tokenizer: PreTrainedTokenizerBase, limit: int, *, chat: bool) -> list[Ids]:
    """As ids, at most `limit` of them each. Raises ConfigError or PromptError."""
    from actors.text.codec import TextCodec
    from cluster.distillation.prompts import read_prompts

    if not file.is_file():
        raise ConfigError(f"there is no file of prompts at {file}")
    chat = chat and bool(getattr(tokenizer, "chat_template", None))
    return read_prompts(file, TextCodec(tokenizer), limit, chat=chat)


def load_target(reference: str, tokenizer: PreTrainedTokenizerBase, device: str | None) -> Target:
    """The target on its device."""
    import torch

    from cluster.distillation.job import Target
    from cluster.models import references, weights

    module = weights.load_module(reference, torch.float32).to(device or weights.default_device())
    fingerprint = references.vocabulary_fingerprint(tokenizer)
    return Target(module, reference, weights.end_ids(module), tokenizer.save_pretrained, fingerprint)


def load_start(reference: str, fingerprint: str) -> Start:
    """A draft to begin from. Raises ConfigError if its vocabulary is not the target's, told by `fingerprint`."""
    import torch

    from cluster.distillation.start import Start
    from cluster.models import references, weights

    if references.vocabulary_fingerprint(references.load_tokenizer(reference)) != fingerprint:
        raise ConfigError(f"{reference} is no draft for this target: it has another vocabulary", "start")
    module, vocabulary = weights.load_draft(reference, torch.float32)
    return Start(module, reference, vocabulary)


@dataclass(frozen=True, slots=True)
class Server:
    """Who is to answer the prompts. through: a URL; `auto` for the server of this machine where one serves the target.

    key: of its API. model: what it calls the target, if it serves several.
    """

    through: str
    key: str | None = None
    model: str | None = None
    concurrency: int = 32

    def source(
        self, target: Target, prompt: Ids, settings: DistillSettings, say: Callable[[str], None]
    ) -> Source | None:
        """Checked against `target` with a short answer to `prompt`; None: sample here.

        Raises ConfigError if it serves something else, UnavailableError if it does not answer; with `auto` both mean
        to sample here, and `say` is told so.
        """
        from deployments.cli.distant_target import DistantTarget

        auto = self.through == "auto"
        found = DistantTarget(
            DEFAULT_URL if auto else self.through,
            answer=settings.answer,
            context=settings.context,
            top=settings.top,
            key=self.key,
            model=self.model,
            concurrency=self.concurrency,
            retries=0 if auto else 6,
        )
        try:
            found.check(target, prompt)
        except OutriderError as error:
            if not auto:
                raise
            say(f"{error}; the target is sampled here")
            return None
        found.retries = 6
        say(f"{found.url} answers the prompts")
        return found


class Recorded:
    """Answers recorded elsewhere: files of `recording.folder` (.db), or shards that another run sampled.

    path: one of them, or a folder of them. Raises ConfigError if there are none, or a file says that it is about a
    target with a vocabulary other than that of `fingerprint`.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        from cluster.distillation.recorder import recorded_fingerprint

        names = ("*.db", "[0-9]*.safetensors")
        self._files = [path] if path.is_file() else [file for name in names for file in sorted(path.glob(name))]
        if not self._files:
            raise ConfigError(f"there is no recorded traffic at {path}")
        for file in self._files:
            if file.suffix != ".safetensors" and recorded_fingerprint(file) != fingerprint:
                raise ConfigError(f"{file} holds the traffic of a target with another vocabulary")

    def __iter__(self) -> Iterator[Sample]:
        """All of them, a part of a file in memory at a time."""
        from cluster.distillation.recorder import recorded_samples
        from cluster.distillation.store import read_shard

        for file in self._files:
            yield from read_shard(file) if file.suffix == ".safetensors" else recorded_samples(file)

    def prompts(self, limit: int) -> list[Ids]:
        """What was asked, each once; longer ones than `limit` are left out. Raises PromptError if none is left."""
        found = dict.fromkeys(tuple(one.prompt.tolist()) for one in self if len(one.prompt) <= limit)
        if not found:
            raise PromptError(f"no recorded prompt has at most {limit} tokens")
        return list(found)
