"""For Ray Data: a ready class for `map_batches`. Needs the extra `ray-data`.

import ray
from deployments.client.ray_data import Generate

answered = ray.data.read_json("prompts.jsonl").map_batches(
    Generate, fn_constructor_kwargs={"target": "auto", "max_tokens": 100}, concurrency=2, batch_size=256
)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from actors.errors import ConfigError
from deployments.client.client import connect


class Generate:
    """Adds an answer to every row: columns `text`, `tokens`, `finish` and `error` (empty where there is an answer).

    target: as `connect` takes it. column: holds text, token ids, or the messages of a conversation.
    window: rows under way at once, per worker of Ray Data. sampling: as `Client.generate` takes it.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        application: str = "outrider",
        key: str | None = None,
        column: str = "prompt",
        window: int = 64,
        **sampling: Any,
    ) -> None:
        _check_installed()
        self._client = connect(target, application=application, key=key)
        self._column = column
        self._window = window
        self._sampling = sampling

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer one batch of rows, given as columns. Raises KeyError when the column is missing."""
        import numpy as np

        prompts = [_plain(value) for value in batch[self._column]]
        results = self._client.generate(prompts, concurrency=self._window, progress=False, **self._sampling)
        tokens = np.empty(len(results), dtype=object)
        tokens[:] = [result.tokens for result in results]
        return {
            **batch,
            "text": np.array([result.text for result in results], dtype=object),
            "tokens": tokens,
            "finish": np.array([result.finish or "" for result in results], dtype=object),
            "error": np.array([str(result.error or "") for result in results], dtype=object),
        }


def _check_installed() -> None:
    """Ray Data itself needs more than Ray Serve. Raises ConfigError that names the extra."""
    missing = [name for name in ("numpy", "pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"Ray Data needs {' and '.join(missing)}: pip install 'outrider[ray-data]'")


def _plain(value: Any) -> Any:
    """A cell as a prompt: arrays become lists, numbers Python's own."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, str) else [dict(item) if isinstance(item, dict) else item for item in value]
