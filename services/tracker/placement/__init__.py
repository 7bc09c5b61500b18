"""Placement: who should hold which layers. A pure function; see docs/adr/0002-coverage-first-placement.md."""

from __future__ import annotations

from services.tracker.placement.accounts import Known
from services.tracker.placement.planner import Planner, plan
from services.tracker.placement.types import WORKSPACE_BYTES, Draft, Plan, Policy, Shortfall

__all__ = ["WORKSPACE_BYTES", "Draft", "Known", "Plan", "Planner", "Policy", "Shortfall", "plan"]
