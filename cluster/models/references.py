"""Where weights come from: a local path, a hub id, `demo:smollm2-135m` or `demo:draft`.

Nothing here loads weights into memory (see weights.py); a reference becomes a local directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import ConfigError, ModelNotFoundError
from cluster.models import demo
from cluster.models.demo import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEMO_TARGET = f"demo:{demo.NAME}"
DEMO_DRAFT = "demo:draft"

_CONVERSION_LIMIT_S = 3600
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def cache_dir() -> Path:
    """Where converted models are kept: $OUTRIDER_CACHE, or ~/.cache/outrider."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "outrider"


def fetch(reference: str, progress: Progress | None = None) -> Path:
    """The local directory of the checkpoint that `reference` names, downloaded and converted where needed.

    `demo:draft` shares the demo target's tokenizer and embedding, so its directory is the target's.
    Raises ModelNotFoundError when the reference leads nowhere, and says why.
    """
    report = progress or _silent
    if not reference.strip():
        raise ModelNotFoundError(f"the model reference is empty; use a path, a hub id, {DEMO_TARGET} or {DEMO_DRAFT}")
    scheme, _, name = reference.partition(":")
    if scheme == "demo":
        if reference not in (DEMO_TARGET, DEMO_DRAFT):
            raise ModelNotFoundError(f"there is no demo model {name!r}; use {DEMO_TARGET} or {DEMO_DRAFT}")
        return _demo_target(report)
    if scheme == "emulated":
        raise ConfigError(f"{reference} has no weights: it goes with the emulated engine only")
    if _looks_local(reference):
        return _local(reference)
    return _from_hub(reference, report)


def load_tokenizer(reference: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a reference. Raises ModelNotFoundError."""
    from transformers import AutoTokenizer

    folder = fetch(reference)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{reference} has no tokenizer that can be loaded: {_first_line(error)}") from error
    return tokenizer


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of the vocabulary: every token string by id, and which ids are special.

    Two models fit together when it is equal; a permuted vocabulary of the same size differs.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    text = json.dumps([vocabulary, sorted(tokenizer.all_special_ids)], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoint_end_ids(folder: Path) -> tuple[int, ...]:
    """Token ids that end an answer, as the checkpoint in `folder` has them (`generation_config.json` comes first)."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress callback that draws one bar per stage on the terminal (standard error)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)

        yield report


def _silent(stage: str, fraction: float) -> None:
    pass


def _demo_target(progress: Progress) -> Path:
    from filelock import FileLock, Timeout

    destination = cache_dir() / demo.NAME
    if _is_checkpoint(destination):
        return destination
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Several processes of one machine start together; one converts, the others wait and find the result.
        with FileLock(f"{destination}.lock", timeout=_CONVERSION_LIMIT_S):
            if not _is_checkpoint(destination):
                demo.install(destination, progress)
    except Timeout as error:
        raise ModelNotFoundError(f"another process holds {destination}.lock for over an hour") from error
    except OSError as error:
        raise ModelNotFoundError(f"cannot keep the demo model in {destination.parent}: {error}") from error
    return destination


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _looks_local(reference: str) -> bool:
    path = Path(reference).expanduser()
    return path.exists() or path.is_absolute() or reference.startswith((".", "~")) or reference.count("/") > 1


def _local(reference: str) -> Path:
    path = Path(reference).expanduser()
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no model directory at {reference}")
    if not _is_checkpoint(path):
        raise ModelNotFoundError(f"{reference} holds no config.json, so it is no Hugging Face checkpoint")
    return path


def _from_hub(reference: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    stage = f"Fetching {reference} from the model hub"
    disable_progress_bars()
    progress(stage, 0.0)
    try:
        folder = Path(snapshot_download(reference, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{reference!r} is neither a local directory nor a hub id") from error
    except OSError as error:  # every error of the hub's client and of the network is one
        raise ModelNotFoundError(
            f"{reference!r} is not a local directory, and the model hub cannot give it: {_first_line(error)}"
        ) from error
    progress(stage, 1.0)
    if not _is_checkpoint(folder):
        raise ModelNotFoundError(f"{reference!r} on the model hub holds no config.json")
    return folder


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
