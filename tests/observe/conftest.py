"""A cluster under a real Prometheus and a real Alertmanager, and ways to wait for what they say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from regrow.observe.stack import Stack

LIMIT_SECONDS = 90.0
"""One generous deadline for every wait."""

ROOT = Path(__file__).parents[2]


async def until(condition: Callable[[], Awaitable[Any]], what: str, story: Callable[[], Awaitable[Any]] | None = None) -> Any:
    """Poll until the condition gives something true."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        found = await condition()
        if found:
            return found
        await asyncio.sleep(0.2)
    raise AssertionError(f"did not see {what}" + (f": {await story()}" if story is not None else ""))


async def firing(stack: Stack) -> set[tuple[str, str]]:
    """{(alert, node or empty)} that fire now in Prometheus, without the facts that only silence."""
    found = await stack.query('ALERTS{alertstate="firing",severity=~"page|ticket"}')
    return {(one["metric"]["alertname"], one["metric"].get("node", "")) for one in found}


async def sent(stack: Stack) -> dict[tuple[str, str], str]:
    """{(alert, node or empty): active or suppressed} in Alertmanager."""
    found = await stack.get(f"{stack.alertmanager}/api/v2/alerts?active=true&inhibited=true")
    return {(one["labels"]["alertname"], one["labels"].get("node", "")): one["status"]["state"] for one in found}
