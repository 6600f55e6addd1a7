"""GPU metrics of a node. Labels come from closed sets: GPUs that are here now, and XIDs of the table (any other is `other`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrow.agent.health.history import History
from regrow.agent.health.sample import NodeSample
from regrow.agent.health.xid import table

TEMPERATURE = "regrow_agent_gpu_temperature_celsius"
XIDS = "regrow_agent_gpu_xids"
PROBE = "regrow_agent_probe_seconds"
OTHER = "other"


class HealthMetrics:
    """Keeps the GPU metrics of telemetry group `agent` in step with what the monitor knows.

    Args:
        made: what `telemetry.build("agent", registry)` returned.
        node: label of this node.
    """

    def __init__(self, made: Mapping[str, Any], node: str) -> None:
        self._made = made
        self._node = node
        self._counted: dict[tuple[str, str], int] = {}
        self._shown: set[str] = set()

    def refresh(self, sample: NodeSample | None, history: History) -> None:
        """Set gauges, raise counters, and drop the series of GPUs that are gone."""
        if sample is None:
            return
        self._made[PROBE].labels(self._node).set(sample.seconds)
        for one in sample.devices:
            if one.temperature is not None and not one.lost:
                self._made[TEMPERATURE].labels(self._node, one.device.uuid).set(one.temperature)
                self._shown.add(one.device.uuid)
        for uuid, known in history.devices.items():
            for code, count in known.xids.items():
                self._raise(uuid, str(code) if code in table() else OTHER, code, count.count)
        self._drop(set(history.devices) | {one.device.uuid for one in sample.devices})

    def _raise(self, uuid: str, label: str, code: int, count: int) -> None:
        before = self._counted.get((uuid, str(code)), 0)
        if count > before:
            self._made[XIDS].labels(self._node, uuid, label).inc(count - before)
        self._counted[uuid, str(code)] = count

    def _drop(self, here: set[str]) -> None:
        for uuid in self._shown - here:
            self._made[TEMPERATURE].remove(self._node, uuid)
        self._shown &= here
        for uuid, code in [key for key in self._counted if key[0] not in here]:
            del self._counted[uuid, code]
            label = code if int(code) in table() else OTHER
            if not any(key == (uuid, label) for key in self._counted):
                self._remove_xid(uuid, label)

    def _remove_xid(self, uuid: str, label: str) -> None:
        try:
            self._made[XIDS].remove(self._node, uuid, label)
        except KeyError:  # several unknown codes share one series
            return
