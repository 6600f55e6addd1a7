"""A fleet in which some servers are bad, with repairs that may not help: the failure model of AIReSim (arXiv:2603.07041).

Its public program (github.com/karthikp-ubc/airesim, as of 7b139c7) was read for the rules; nothing of its text is here.
"""

from __future__ import annotations

import random

import msgspec

from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.inject import Injector
from regrow.supervisor.sim.nodes import Node
from regrow.supervisor.sim.world import World

DAY_SECONDS = 86_400.0


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and repairs. Defaults: table 1 of the paper, as its program ships them."""

    failures_per_day: float = 0.01
    """Of a good server, while it trains."""
    bad_share: float = 0.15
    bad_factor: float = 5.0
    """A bad server has so many times the failures of a good one besides those."""
    automatic_seconds: float = 2 * 3600.0
    """Mean of the first repair, exponential."""
    manual_seconds: float = 2 * DAY_SECONDS
    """Mean of the second one, exponential."""
    to_manual: float = 0.80
    """Share of the repairs that go on to the second one."""
    automatic_fails: float = 0.40
    manual_fails: float = 0.20
    """Share of the repairs after which a bad server is as bad as before."""


class Fleet:
    """Breaks servers of the job while it trains, and mends them. Everything is drawn from one stream."""

    def __init__(self, world: World, servers: Servers, rng: random.Random) -> None:
        self.num_failures = 0
        self._world = world
        self._servers = servers
        self._rng = rng
        self._injector = Injector(world)
        names = list(world.nodes)
        self._bad = set(rng.sample(names, int(len(names) * servers.bad_share)))

    def start(self) -> None:
        """Every server's next failure."""
        for node in self._world.nodes.values():
            self._next(node)

    def _next(self, node: Node) -> None:
        """Exponential gaps have no memory: a failure that would fall into a time without training is left out, which is the same
        as counting training time only."""
        rate = self._servers.failures_per_day * (1.0 + self._servers.bad_factor * (node.name in self._bad)) / DAY_SECONDS
        self._world.loop.after(self._rng.expovariate(rate), lambda: self._fails(node))

    def _fails(self, node: Node) -> None:
        run = self._world.run
        if run is None or run.state != "training" or node.name not in run.members:
            self._next(node)
            return
        self.num_failures += 1
        seconds = self._rng.expovariate(1.0 / self._servers.automatic_seconds)
        fails = self._servers.automatic_fails
        if self._rng.random() < self._servers.to_manual:
            seconds += self._rng.expovariate(1.0 / self._servers.manual_seconds)
            fails = self._servers.manual_fails
        if self._rng.random() >= fails:
            self._bad.discard(node.name)
        self._injector.happen(Fault(at=self._world.now, kind="host", nodes=(node.index,), seconds=seconds, component="server"))
        self._world.loop.after(seconds, lambda: self._next(node))
