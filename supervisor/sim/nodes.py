"""Hosts and their agents: what they persist, what they obey, what they tell a leader."""

from __future__ import annotations

from collections.abc import Callable

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.sim.models import JOB


class Node:
    """One host. Fences survive its restarts, not its replacement."""

    def __init__(self, index: int, places: int, *, named_devices: bool) -> None:
        self.index = index
        self._named = named_devices
        self.name = f"n{index:05d}"
        self.places = places
        self.up = True
        self.agent = True
        """The agent process lives."""
        self.incarnation = 1
        self.boot = 1
        self.part = 1
        """Which GPU is in the slot: another one after a repair that changed it."""
        self.epoch = 0
        """Highest epoch that it has seen (persisted)."""
        self.generation = 0
        """Highest generation that it has started (persisted)."""
        self.stopped = 0
        """Highest generation that it was told to stop (persisted)."""
        self.running = 0
        """Generation whose workers are there; 0: none."""
        self.exits: tuple[wire.WorkerExit, ...] = ()
        """Of the running generation."""
        self.told: tuple[str, ...] = ()
        """Phases of the running generation that it has passed."""
        self.spare_store = 1
        self.health = wire.HealthVerdict(state="healthy")
        self.leaving = ""
        self.outbox: list[Callable[[float], e.Event]] = []
        """What it could not tell while its network was cut."""

    def refuses(self, epoch: int, generation: int) -> str:
        """Why an order to start is refused; empty: it is obeyed. The rules of agent/core.py."""
        if epoch < self.epoch:
            return f"epoch {epoch} is behind {self.epoch}, which this node has seen"
        if self.leaving:
            return f"node is leaving: {self.leaving}"
        if generation <= max(self.generation, self.stopped):
            return f"generation {generation} is not above {max(self.generation, self.stopped)}, which this node has seen"
        return ""

    @property
    def host(self) -> str:
        """The machine behind the name: fences are on its disk and go with it."""
        return f"{self.name}/{self.part}"

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that are there now; none in large clusters, where hardware is known by its host."""
        return (f"GPU-{self.index:05d}-{self.part}",) if self._named else ()

    def hello(self, workers: tuple[wire.WorkerAssignment, ...]) -> wire.Hello:
        """What it says when it connects."""
        running = None
        if self.running:
            running = wire.RunningGeneration(job=JOB, epoch=self.epoch, generation=self.running, workers=workers, exits=self.exits)
        return wire.Hello(
            cluster="sim",
            node=self.name,
            incarnation=f"{self.name}-{self.incarnation}",
            address=self.name,
            peer_address=f"{self.name}:7",
            slots=self.places,
            devices=tuple(wire.Device(uuid=uuid) for uuid in self.devices()),
            highest_epoch=self.epoch,
            highest_generation=max(self.generation, self.stopped),
            running=running,
            spare_store=self.store_address(),
            health=self.health,
            boot_id=f"boot-{self.boot}",
        )

    def store_address(self) -> str:
        """Address of a TCPStore that nobody has used."""
        return f"{self.name}:{10_000 + self.spare_store}"

    def reboot(self, *, replaced: bool) -> None:
        """Another boot of the host; with `replaced`, another host or GPU under the same name."""
        self.up, self.agent = True, True
        self.boot += 1
        self.incarnation += 1
        self.running, self.exits, self.told = 0, (), ()
        self.leaving = ""
        self.spare_store += 1
        self.health = wire.HealthVerdict(state="healthy")
        self.outbox = []
        if replaced:
            self.part += 1
            self.epoch = self.generation = self.stopped = 0
