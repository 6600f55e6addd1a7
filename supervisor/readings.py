"""What a node's GPUs read now, asked of its agent when a person looks at the node: beats do not carry it."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec

from regrow import wire
from regrow.store.base import Store
from regrow.supervisor.keys import Keys

_LIMIT_SECONDS = 2.0
_LINE = re.compile(rb'^regrow_agent_gpu_(\w+?)\{node="[^"]*",device="([^"]*)"\} (\S+)$', re.MULTILINE)
_SHOWN = ("temperature_celsius", "slowdown_celsius", "memory_used_bytes", "memory_bytes", "power_watts", "busy_ratio", "lost")


async def gpu_readings(store: Store, keys: Keys, node: str) -> dict[str, Any]:
    """{"gpus": {uuid: {name: value}}, "problem": why there are none}, names and units as in the agent's metrics.

    Raises:
        StoreError: the store does not answer.
    """
    item = await store.get(keys.nodes + node)
    address = msgspec.json.decode(item.value, type=wire.NodeRecord).metrics_address if item is not None else ""
    if not address:
        return {"gpus": {}, "problem": "its agent serves no metrics" if item is not None else "its agent is not connected to the store"}
    try:
        async with httpx.AsyncClient(timeout=_LIMIT_SECONDS, trust_env=False) as client:
            answer = await client.get(f"http://{address}/metrics")
            answer.raise_for_status()
    except httpx.HTTPError as error:
        return {"gpus": {}, "problem": f"its agent's metrics at {address} do not answer: {str(error) or type(error).__name__}"}
    gpus: dict[str, dict[str, float]] = {}
    for name, device, value in _LINE.findall(answer.content):
        if name.decode() in _SHOWN:
            gpus.setdefault(device.decode(), {})[name.decode()] = float(value)
    return {"gpus": gpus, "problem": "" if gpus else "no GPU answers on this node"}
