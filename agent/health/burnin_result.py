"""One check of the burn-in child, as it tells it."""

from __future__ import annotations

import msgspec


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished check."""

    name: str
    ok: bool
    seconds: float
    detail: str = ""
