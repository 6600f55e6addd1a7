"""One check before a node joins, as it is told."""

from __future__ import annotations

import msgspec

FAULT_VARIABLE = "REGROW_PREFLIGHT_FAULT"
"""Chaos: which check must fail on this node (agent/health/burnin.py, agent/exchange.py)."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished check."""

    name: str
    ok: bool
    seconds: float
    detail: str = ""
