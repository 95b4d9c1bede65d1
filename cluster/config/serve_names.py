"""What the deployments of an application are called in Ray Serve, for who builds them and for who looks them up."""

from __future__ import annotations

from typing import Literal

INGRESS = "Ingress"
ORCHESTRATOR = "Orchestrator"
TARGET_TIER = "TargetTier"
DRAFT_TIER = "DraftTier"

TIER_DEPLOYMENTS: dict[Literal["target", "draft"], str] = {"target": TARGET_TIER, "draft": DRAFT_TIER}
