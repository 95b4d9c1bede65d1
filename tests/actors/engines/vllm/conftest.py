"""What needs vLLM is collected only where it is installed (`make test-vllm`); the rest belongs to `make test`."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_vllm_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and what it brings warn of each other; what this project's own modules warn of stays an error."""
    for item in items:
        if item.path.name.startswith("test_vllm_"):
            for module in ("vllm", "torch", "transformers", "pydantic", "multiprocessing", "importlib", "zmq"):
                item.add_marker(pytest.mark.filterwarnings(rf"ignore:::{module}(\..*)?"))
        if HAS_VLLM and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"))


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What vLLM leaves open when it fails to start is warned of where the warning is expected."""
    yield
    if HAS_VLLM:
        gc.collect()


if HAS_VLLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401
