"""The ways of decoding that the bench sets side by side, as changes to one deployment's configuration."""

from __future__ import annotations

from typing import Any, Literal

from actors.settings import LookaheadSettings, TreeSettings
from cluster.config.deployment import DeploymentConfig, DraftTier

Mode = Literal["plain", "in turn", "chain", "tree"]
MODES: tuple[Mode, ...] = ("plain", "in turn", "chain", "tree")

PATIENCE_MS = 1000.0
"""In turn, the target waits for its drafts however long they take; a bound only keeps a lost draft from ending all."""


def in_mode(config: DeploymentConfig, mode: Mode, in_turn_k: int, draft_depth: int = 24) -> DeploymentConfig:
    """`config` as it is for "tree"; changed for the others.

    plain: no draft. in turn: the draft writes a chain of in_turn_k tokens, the target verifies it, each waiting for
    the other. chain: the draft runs ahead along its first guesses, without alternatives.
    """
    if mode == "plain":
        fixed = LookaheadSettings(mode="fixed", maximum=0)
        return _changed(config, target={"lookahead": fixed}, draft={"kind": "none", "model": config.draft.model})
    if mode == "in turn":
        fixed = LookaheadSettings(mode="fixed", maximum=in_turn_k, wait="full", max_wait_ms=PATIENCE_MS)
        return _changed(config, target={"lookahead": fixed}, tree=_chain(config.draft, in_turn_k))
    if mode == "chain":
        return _changed(config, tree=_chain(config.draft, draft_depth))
    return config


def _chain(draft: DraftTier, depth: int) -> TreeSettings:
    """One child per node; as many nodes a step as sequences may want one each."""
    width = min(draft.settings.slots, 256)
    return TreeSettings(width=width, branching=1, depth=depth, nodes=max(depth, 2), min_reach=0.0)


def _changed(
    config: DeploymentConfig,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    tree: TreeSettings | None = None,
) -> DeploymentConfig:
    parts: dict[str, Any] = {}
    if target:
        settings = config.target.settings.model_copy(update=target)
        parts["target"] = config.target.model_copy(update={"settings": settings})
    changes: dict[str, Any] = dict(draft or {})
    if tree:
        changes["settings"] = config.draft.settings.model_copy(update={"tree": tree})
    if changes:
        parts["draft"] = config.draft.model_copy(update=changes)
    return config.model_copy(update=parts)
