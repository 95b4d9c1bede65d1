"""The configuration reference: it is what the classes say, and they say something of every setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.deployment import DeploymentConfig
from cluster.config.reference import descriptions, groups, reference

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_command_prints() -> None:
    """After a change of settings: `outrider config reference > docs/configuration.md`."""
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == reference()


@pytest.mark.parametrize("path", sorted({path for path, _ in groups(DeploymentConfig)}))
def test_every_setting_is_described(path: str) -> None:
    group = dict(groups(DeploymentConfig))[path]
    described = descriptions(group)
    leaves = {name for name in group.model_fields if f"{path}.{name}".strip(".") not in dict(groups(DeploymentConfig))}
    assert leaves <= set(described)


def test_bounds_defaults_and_choices_are_shown() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `depth`")]
    assert rows == [
        "| `depth` | whole number (≥ 1, ≤ 64) | `16` | How far past the committed prefix the tree may reach. |"
    ]
    assert "| `engine` | `transformers`, `vllm`, `emulated` | `transformers` |" in reference()
    assert "| `folder` | text | required |" in reference()
