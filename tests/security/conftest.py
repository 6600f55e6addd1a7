from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from regrow.store.memory import MemoryStore
from regrow.supervisor.config import SupervisorConfig
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.service import Supervisor

LIMIT = 60.0


class Serving:
    """A supervisor that leads, in a thread and loop of its own."""

    def __init__(self, folder: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.made: Supervisor
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._main(folder),))
        self._thread.start()
        assert self._ready.wait(LIMIT)

    async def _main(self, folder: str) -> None:
        # nobody takes over on a busy machine: a node that joined stays
        config = SupervisorConfig(cluster="t", store="memory://", state=folder, ttl=LIMIT, name="s0")
        store = MemoryStore()
        self.made = Supervisor(config, Policy(), store=store, on_serving=lambda _status: self._ready.set())
        await self.made.run()
        await store.close()

    def post(self, event: Any) -> None:
        """A fact for the leader."""
        self.loop.call_soon_threadsafe(self.made.post, event)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.made.stop)
        self._thread.join(LIMIT)
        self.loop.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    one = Serving(str(tmp_path_factory.mktemp("api")))
    yield one
    one.stop()


@pytest.fixture(scope="module")
def api(serving: Serving) -> Iterator[httpx.Client]:
    """A client of a supervisor that leads."""
    with httpx.Client(base_url=f"http://{serving.made.http_address}", timeout=LIMIT, trust_env=False) as client:
        yield client
