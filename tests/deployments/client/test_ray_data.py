"""The class for Ray Data, called as Ray Data calls it."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import Reciter, byte_codec

from actors.errors import ConfigError
from deployments.client import ray_data
from deployments.client.client import Client


def test_what_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: None if name == "pandas" else object())
    with pytest.raises(ConfigError, match=r"^Ray Data needs pandas: pip install 'outrider\[ray-data\]'$"):
        ray_data.Generate("auto")


def test_adds_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = byte_codec()
    reciter = Reciter(codec)
    monkeypatch.setattr(ray_data, "connect", lambda *_, **__: Client(reciter))
    monkeypatch.setattr(ray_data, "find_spec", lambda name: object())  # Ray Data itself is not called here
    generate = ray_data.Generate("auto", max_tokens=5)
    prompts = np.empty(3, dtype=object)
    prompts[:] = ["a", np.array([5, 6]), np.array([{"role": "user", "content": "x"}], dtype=object)]
    got = generate({"prompt": prompts, "n": np.arange(3)})
    assert got["n"].tolist() == [0, 1, 2]
    assert got["text"].tolist() == ["Hello"] * 3
    assert got["tokens"][0] == list(codec.encode("Hello"))
    assert got["error"].tolist() == [""] * 3
    assert [(r.text, r.tokens, bool(r.messages)) for r in sorted(reciter.requests, key=lambda r: str(r.text))] == [
        (None, (5, 6), False),
        (None, None, True),
        ("a", None, False),
    ]
