"""What a distillation is given, loaded and checked: the target, prompts, recorded answers, a draft to begin from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import ConfigError, OutriderError, PromptError
from deployments.client.address import DEFAULT_URL

MIN_OWN_PROMPTS = 10
"""However little time there is."""

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


def own_prompts(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    settings: DistillSettings,
    count: int,
    *,
    chat: bool,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Ids]:
    """`count` prompts that the target wrote itself, or as many as it writes in a quarter of the sampling time.

    They are kept beside the run's other work, so that a run that goes on has the same ones. Raises ConfigError if the
    target's template does not allow it, PromptError if hardly any of what it writes makes sense.
    """
    from actors.text.codec import TextCodec
    from cluster.distillation import own_prompts as own
    from cluster.distillation.files import write_whole
    from cluster.distillation.job import locked
    from cluster.distillation.prompts import read_prompts
    from cluster.distillation.sampling import local_sampler

    codec, limit = TextCodec(tokenizer), settings.context - settings.answer
    work = out.with_name(f"{out.name}.partial")
    file = work / "own-prompts.jsonl"
    with locked(work):
        if file.exists():
            return read_prompts(file, codec, limit, chat=chat)
        if chat and getattr(tokenizer, "chat_template", None):
            openings, end = own.chat_openings(codec)
        else:
            openings, end = own.document_openings(tokenizer.bos_token_id, target.eos), None
        eos = target.eos if end is None else tuple(dict.fromkeys((*target.eos, end)))
        source = local_sampler(target, settings, answer=own.LONGEST, eos=eos)
        until = clock() + settings.minutes * 60 * settings.sampling_share / 4

        def go_on(kept: int, turns: int) -> bool:
            say(f"prompts of the target's own: {kept} of {count} ({turns} turns)")
            return clock() < until or kept < MIN_OWN_PROMPTS

        written = own.write_prompts(
            source, codec, openings, end, count=count, limit=limit, seed=settings.seed, go_on=go_on
        )
        say(f"prompts of the target's own: {written}")
        lines = "".join(json.dumps({"tokens": prompt}) + "\n" for prompt in written.prompts)
        write_whole(file, lines.encode())
        return written.prompts


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
