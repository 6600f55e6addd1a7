"""A local cluster whose nodes can lose the network to etcd and supervisor, and the right time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections import defaultdict
from pathlib import Path

from regrow.chaos.clock import FakeClock
from regrow.chaos.relay import Relay, Weather
from regrow.ckpt.faults import FILE_MARK
from regrow.ckpt.faults import VARIABLE as STORAGE_FAULTS
from regrow.errors import OperationalError
from regrow.local.children import Recipe
from regrow.local.cluster import ClusterPlan, LocalCluster

_HERE, _THROUGH_RELAY = "127.0.0.1", "127.0.0.2"
"""The supervisor listens on the first address and tells agents the second one, same port: there the relay listens."""


class ChaosCluster(LocalCluster):
    """The parts are those of every local cluster; agents reach etcd and the supervisor through relays."""

    def __init__(self, plan: ClusterPlan) -> None:
        super().__init__(plan)
        self.weather: defaultdict[str, Weather] = defaultdict(Weather)
        self.storage_faults = self.root / "storage-faults"
        self._beat_port = 0
        self._relays: list[Relay] = []
        self._stores: dict[str, str] = {}

    def clock(self, node: str) -> FakeClock:
        """The wall clock of a node."""
        return FakeClock(self.root / "nodes" / node / "clock")

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Stop everything, the relays last."""
        await super().stop(grace_seconds)
        for relay in self._relays:
            await relay.stop()
        self._relays.clear()

    async def _start_store(self) -> str:
        url = await super()._start_store()
        host, _, port = url.partition("://")[2].partition(":")
        for node in self.plan.node_names():
            relay = Relay(lambda: (host, int(port)), self.weather.__getitem__, node)
            self._stores[node] = f"etcd://{_HERE}:{await relay.start(_HERE)}"
            self._relays.append(relay)
        await self._start_beat_relay()
        return url

    async def _start_beat_relay(self) -> None:
        """A port that is free on both addresses."""
        while not self._beat_port:
            with socket.socket() as probe:
                probe.bind((_HERE, 0))
                port = int(probe.getsockname()[1])
            relay = Relay(lambda port=port: (_HERE, port), self.weather.__getitem__)
            with contextlib.suppress(OSError):
                self._beat_port = await relay.start(_THROUGH_RELAY, port)
                self._relays.append(relay)

    def _supervisor_recipe(self) -> Recipe:
        recipe = super()._supervisor_recipe()
        argv = _with(recipe.argv, "--beat", f"{_HERE}:{self._beat_port}")
        return dataclasses.replace(recipe, argv=(*argv, "--advertise", _THROUGH_RELAY))

    def _agent_recipe(self, node: str) -> Recipe:
        recipe = super()._agent_recipe(node)
        env = {**recipe.env, **self.clock(node).environment(), STORAGE_FAULTS: f"{FILE_MARK}{self.storage_faults}"}
        return dataclasses.replace(recipe, argv=_with(recipe.argv, "--store", self._stores[node]), env=env)

    async def straggler(self, job: str) -> int | None:
        """The rank of the job that the supervisor's metrics name as slow; -1: all; None: nobody, or no answer now."""
        with contextlib.suppress(OperationalError):
            text = await self.api.text("/metrics")
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("regrow_straggler_rank{") and f'job_name="{job}"' in name:
                    return int(float(value))
        return None

    def break_storage(self, text: str) -> None:
        """Faults of all checkpoint writers from now on, in the words of `ckpt.faults`; empty: none."""
        fresh = Path(f"{self.storage_faults}.{os.getpid()}")
        fresh.write_text(text, encoding="ascii")
        fresh.replace(self.storage_faults)


def _with(argv: tuple[str, ...], flag: str, value: str) -> tuple[str, ...]:
    """The same words with another value behind a flag."""
    place = argv.index(flag) + 1
    return (*argv[:place], value, *argv[place + 1 :])
