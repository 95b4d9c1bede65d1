"""The sample store: what the target said, with its best log-probabilities, in shards on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.errors import ConfigError
from cluster.distillation.files import write_whole


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the target.

    prompt: int32 [P]. answer: int32 [L], the end of text included if it was reached.
    top_ids: int32 [L, K], best first; top_logp: float16 [L, K], the target's log p at temperature 1.
    """

    prompt: Tensor
    answer: Tensor
    top_ids: Tensor
    top_logp: Tensor
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class SampleStore:
    """Shards `NNNNN.safetensors` in a folder; each appears whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes: dict[Path, int] = {}

    @property
    def shards(self) -> list[Path]:
        """In the order in which they were written."""
        return sorted(self._folder.glob("[0-9]*.safetensors"))

    @property
    def tokens(self) -> int:
        """Answer tokens in all shards."""
        return sum(map(self._size, self.shards))

    def append(self, samples: Sequence[Sample]) -> Path:
        """Write one shard. Raises OSError when the disk is full; then nothing of it remains."""
        from safetensors.torch import save

        shards = self.shards
        path = self._folder / f"{int(shards[-1].stem) + 1 if shards else 0:05d}.safetensors"
        tensors = {
            "prompt_lengths": torch.tensor([len(s.prompt) for s in samples], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(s.answer) for s in samples], dtype=torch.int32),
            "temperatures": torch.tensor([s.temperature for s in samples], dtype=torch.float32),
            "prompts": torch.cat([s.prompt for s in samples]),
            "answers": torch.cat([s.answer for s in samples]),
            "top_ids": torch.cat([s.top_ids for s in samples]),
            "top_logp": torch.cat([s.top_logp for s in samples]),
        }
        tokens = len(tensors["answers"])
        write_whole(path, save(tensors, metadata={"tokens": str(tokens)}))
        self._sizes[path] = tokens
        return path

    def samples(self) -> Iterator[Sample]:
        """All of them, one shard in memory at a time."""
        for shard in self.shards:
            yield from read_shard(shard)

    def _size(self, shard: Path) -> int:
        if shard not in self._sizes:
            self._sizes[shard] = _header_tokens(shard)
        return self._sizes[shard]


NEVER = -1e4
"""Log-probability of a place that holds no token; float16 has it."""


def padded(sample: Sample, top: int) -> Sample:
    """With `top` log-probabilities per position: the best ones, or all and places that hold no token."""
    missing = max(0, top - sample.top_ids.shape[1])
    ids = torch.nn.functional.pad(sample.top_ids[:, :top], (0, missing))
    logp = torch.nn.functional.pad(sample.top_logp[:, :top], (0, missing), value=NEVER)
    return dataclasses.replace(sample, top_ids=ids, top_logp=logp)


def read_shard(shard: Path) -> list[Sample]:
    """The answers of a shard. Raises ConfigError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        t = load_file(shard)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"the samples in {shard} are damaged: delete that file ({error})") from error
    lengths = t["answer_lengths"].tolist()
    parts = zip(
        _split(t["prompts"], t["prompt_lengths"].tolist()),
        _split(t["answers"], lengths),
        _split(t["top_ids"], lengths),
        _split(t["top_logp"], lengths),
        t["temperatures"].tolist(),
        strict=True,
    )
    return [Sample(*part) for part in parts]


def _split(tensor: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.split_with_sizes(tensor, lengths)
    return parts


def _header_tokens(shard: Path) -> int:
    """From the file's header alone (its length in 8 bytes, then JSON)."""
    try:
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return int(header["__metadata__"]["tokens"])
    except (ValueError, KeyError, OverflowError, MemoryError) as error:
        raise ConfigError(f"the samples in {shard} are damaged: delete that file") from error
