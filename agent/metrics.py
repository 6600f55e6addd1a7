"""The agent's /metrics page, on a loopback port by default, without a thread: written anew at each scrape."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import psutil
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from regrow.agent import metrics_page
from regrow.agent.worker_metrics import WorkerMetrics
from regrow.telemetry import Page

if TYPE_CHECKING:
    from regrow.agent.driver import Agent

_LOOK_SECONDS = 0.5
"""How often the loop is asked whether it is late."""
_CPU_LOOKS = 10
_REQUEST_SECONDS = 5.0
_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104  # compared, not bound


class AgentMetrics:
    """Host, GPUs, the agent itself, and the workers through it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.workers = WorkerMetrics()
        self._server: asyncio.Server | None = None
        self._cpu_ratio = 0.0
        self._lag_seconds = 0.0
        self.address = ""
        """host:port as bound; empty: not served."""

    async def start(self) -> None:
        """Bind the port, when there is one."""
        if not self._agent.settings.metrics:
            return
        host, _, port = self._agent.settings.metrics.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host.strip("[]"), int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def reachable_at(self, host: str) -> str:
        """host:port for who scrapes: where it is bound, or this host's address when it is bound everywhere."""
        bound, _, port = self.address.rpartition(":")
        return f"{host}:{port}" if bound.strip("[]") in _ANYWHERE else self.address

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    async def run(self) -> None:
        """Watch the loop's own delay and the CPU, until cancelled."""
        psutil.cpu_percent()
        loop = asyncio.get_running_loop()
        looks = 0
        while True:
            due = loop.time() + _LOOK_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
            self._lag_seconds = max(self._lag_seconds, loop.time() - due)
            looks += 1
            if looks % _CPU_LOOKS == 0:
                self._cpu_ratio = psutil.cpu_percent() / 100.0

    def exposition(self) -> bytes:
        """Prometheus text format."""
        page, agent = Page(), self._agent
        node = agent.settings.node
        metrics_page.put_agent(page, node, agent)
        metrics_page.put_host(page, node, agent.settings.state, self._cpu_ratio)
        metrics_page.put_gpus(page, node, agent.health)
        page.put("regrow_agent_loop_lag_seconds", self._lag_seconds, node)
        self._lag_seconds = 0.0
        local = agent.state.current
        if local is not None and local.live:
            self.workers.put(page, node, local.job, local.generation, agent.view.progress())
        return page.text() + generate_latest(self._process)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                request = (await reader.readline()).split()
                while (await reader.readline()).strip():
                    pass
                found = len(request) > 1 and request[0] == b"GET" and request[1].split(b"?")[0] == b"/metrics"
                body = self.exposition() if found else b"see /metrics\n"
                status = b"200 OK" if found else b"404 Not Found"
                kind = CONTENT_TYPE_LATEST.encode() if found else b"text/plain"
                writer.write(
                    b"HTTP/1.1 " + status + b"\r\nContent-Type: " + kind + b"\r\nContent-Length: " + str(len(body)).encode()
                    + b"\r\nConnection: close\r\n\r\n" + body
                )  # fmt: skip
                await writer.drain()
        writer.close()
