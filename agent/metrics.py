"""Host metrics of a node and its /metrics page, on a loopback port, without a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from regrow import telemetry

if TYPE_CHECKING:
    from regrow.agent.driver import Agent

_log = logging.getLogger("regrow.agent.metrics")

_EVERY_SECONDS = 5.0
_REQUEST_SECONDS = 5.0


class AgentMetrics:
    """Gauges of the group `agent`, refreshed every few seconds, served as text."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.registry = CollectorRegistry()
        self._gauges = telemetry.build("agent", self.registry)
        self._xids: dict[tuple[str, int], int] = {}
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        """Bind the port, when there is one."""
        if not self._agent.settings.metrics:
            return
        host, _, port = self._agent.settings.metrics.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host.strip("[]"), int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    async def run(self) -> None:
        """Refresh until cancelled."""
        psutil.cpu_percent()
        while True:
            self.refresh()
            await asyncio.sleep(_EVERY_SECONDS)

    def refresh(self) -> None:
        """Read the host."""
        agent = self._agent
        node = agent.settings.node
        local = agent.state.current
        values = {
            "regrow_agent_up": 1.0,
            "regrow_agent_host_memory_available_bytes": float(psutil.virtual_memory().available),
            "regrow_agent_host_cpu_ratio": psutil.cpu_percent() / 100.0,
            "regrow_agent_host_disk_free_bytes": float(psutil.disk_usage(str(agent.settings.state)).free),
            "regrow_agent_workers": float(len(local.live)) if local is not None else 0.0,
        }
        last = agent.beat.last_beat_at
        if last is not None:
            values["regrow_agent_beat_age_seconds"] = asyncio.get_running_loop().time() - last
        for name, value in values.items():
            self._gauges[name].labels(node=node).set(value)
        self._refresh_devices(node)

    def _refresh_devices(self, node: str) -> None:
        """Series of GPUs that are gone are removed; a counter starts anew with its agent."""
        sample = self._agent.health.sample()
        temperatures = self._gauges["regrow_agent_gpu_temperature_celsius"]
        temperatures.clear()
        if sample is not None:
            self._gauges["regrow_agent_probe_seconds"].labels(node=node).set(sample.seconds)
            for one in sample.devices:
                if one.temperature is not None:
                    temperatures.labels(node=node, device=one.device.uuid).set(one.temperature)
        for (uuid, code), count in self._agent.health.xids().items():
            before = self._xids.get((uuid, code), 0)
            if count > before:
                self._gauges["regrow_agent_gpu_xids"].labels(node=node, device=uuid, xid=str(code)).inc(count - before)
                self._xids[(uuid, code)] = count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                request = (await reader.readline()).split()
                while (await reader.readline()).strip():
                    pass
                found = len(request) > 1 and request[0] == b"GET" and request[1].split(b"?")[0] == b"/metrics"
                body = generate_latest(self.registry) if found else b"see /metrics\n"
                status = b"200 OK" if found else b"404 Not Found"
                kind = CONTENT_TYPE_LATEST.encode() if found else b"text/plain"
                writer.write(
                    b"HTTP/1.1 " + status + b"\r\nContent-Type: " + kind + b"\r\nContent-Length: " + str(len(body)).encode()
                    + b"\r\nConnection: close\r\n\r\n" + body
                )  # fmt: skip
                await writer.drain()
        writer.close()
