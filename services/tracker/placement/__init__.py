"""Placement: who should hold which layers. A pure function; see docs/adr/0002-coverage-first-placement.md."""

from __future__ import annotations

from services.tracker.placement.accounts import Account, believed_bytes, open_accounts
from services.tracker.placement.plan import plan
from services.tracker.placement.types import WORKSPACE_BYTES, Draft, Plan, Policy, Shortfall

__all__ = [
    "WORKSPACE_BYTES",
    "Account",
    "Draft",
    "Plan",
    "Policy",
    "Shortfall",
    "believed_bytes",
    "open_accounts",
    "plan",
]
