"""An agent without processes: speaks wire.py over real TCP, runs pretended workers that complete steps when told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from regrow import wire


class Deadline:
    """One generous deadline for all waits."""

    seconds = 20.0


async def eventually(condition: Callable[[], Any], what: str, seconds: float | None = None) -> Any:
    """Wait until `condition()` is true; its value."""
    async with asyncio.timeout(seconds or Deadline.seconds):
        while True:
            value = condition()
            if value:
                return value
            await asyncio.sleep(0.005)
    raise AssertionError(what)


class StubAgent:
    """One node. `auto`: starts, passes all phases and reports steps by itself when the cluster's clock ticks."""

    def __init__(self, node: str, address: Callable[[], str | None], *, slots: int = 2, hardware: str = "", boot: str = "b1") -> None:
        self.node = node
        self.slots = slots
        self.hardware = hardware or f"hw-{node}"
        self.boot = boot
        self.incarnation = f"{node}-1"
        self.highest_epoch = 0
        self.highest_generation = 0
        self.order: wire.StartGeneration | None = None
        self.live = False
        """Workers run."""
        self.step = 0
        self.exits: dict[int, wire.WorkerExit] = {}
        self.received: list[Any] = []
        self.welcomed = asyncio.Event()
        self.refused: list[str] = []
        self.health = wire.HealthVerdict(state="healthy")
        self.answer_starts = True
        self.released = False
        self.written: Callable[[bytes], bytes] = bytes
        """What another version would have sent for this line."""
        self.understood: Callable[[bytes], bytes] = bytes
        """What another version would have read of this line; empty: nothing."""
        self._address = address
        self._spares = 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._muted = False

    @property
    def spare(self) -> str:
        own = 100 * int("".join(letter for letter in self.node if letter.isdigit()) or 0)
        return f"127.0.0.1:{40_000 + own % 20_000 + self._spares}"

    @property
    def ranks(self) -> list[int]:
        return [worker.rank for worker in self.order.workers] if self.order is not None else []

    @property
    def generation(self) -> int:
        return self.order.spec.generation if self.order is not None else 0

    def start(self) -> None:
        """Connect, and again and again."""
        self._task = asyncio.create_task(self._run())

    async def die(self, *, workers: bool = True) -> None:
        """SIGKILL of the agent (and of its workers)."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._drop()
        if workers:
            self.live = False

    async def restart(self) -> None:
        """A new agent process with the same state folder."""
        number = int(self.incarnation.rsplit("-", 1)[1]) + 1
        self.incarnation = f"{self.node}-{number}"
        self.welcomed.clear()
        self._muted = False
        self.start()

    def mute(self) -> None:
        """The network swallows everything that this agent sends; the connection stays."""
        self._muted = True

    def unmute(self) -> None:
        self._muted = False

    def send(self, message: msgspec.Struct) -> None:
        if self._writer is not None and not self._muted:
            self._writer.write(self.written(wire.encode(message)))

    def phase(self, name: str, **more: Any) -> None:
        assert self.order is not None
        self.send(wire.GenerationPhase(job=self.order.spec.job, generation=self.generation, phase=name, **more))

    def complete(self, step: int, *, loss: float = 1.0, digests: dict[int, str] | None = None, seconds: float = 0.01) -> None:
        """All workers of the node applied a step."""
        assert self.order is not None
        self.step = step
        reports = tuple(
            wire.StepReport(
                generation=self.generation,
                rank=rank,
                step=step,
                loss=loss,
                samples=step * 8,
                step_seconds=seconds,
                digest=(digests or {}).get(rank, ""),
            )
            for rank in self.ranks
        )
        self.send(wire.NodeSteps(job=self.order.spec.job, generation=self.generation, step=step, reports=reports))

    def exit(self, rank: int, **how: Any) -> None:
        """One worker ended."""
        found = wire.WorkerExit(rank=rank, local_rank=self.ranks.index(rank), pid=1, last_step=self.step, **how)
        self.exits[rank] = found
        assert self.order is not None
        self.send(wire.WorkersExited(job=self.order.spec.job, generation=self.generation, exits=(found,)))

    def exit_all(self, **how: Any) -> None:
        for rank in self.ranks:
            self.exit(rank, **how)
        self.live = False

    def committed(self, step: int, directory: str = "/ckpt") -> None:
        """The committing agent committed a checkpoint."""
        assert self.order is not None
        self.send(
            wire.CheckpointChanged(
                job=self.order.spec.job,
                generation=self.generation,
                step=step,
                state="committed",
                directory=f"{directory}/step-{step}-g{self.generation}",
                record_digest="d",
                samples=step * 8,
            )
        )

    def hello(self) -> wire.Hello:
        running = None
        if self.order is not None and self.live:
            running = wire.RunningGeneration(
                job=self.order.spec.job,
                epoch=self.order.epoch,
                generation=self.generation,
                workers=self.order.workers,
                exits=tuple(self.exits.values()),
                spec=self.order.spec,
                job_spec=self.order.job_spec,
            )
        return wire.Hello(
            cluster="test",
            node=self.node,
            incarnation=self.incarnation,
            address="127.0.0.1",
            peer_address=f"127.0.0.1:{50_000 + len(self.node)}",
            slots=self.slots,
            devices=tuple(wire.Device(uuid=f"GPU-{self.node}-{index}", index=index) for index in range(self.slots)),
            hardware_id=self.hardware,
            highest_epoch=self.highest_epoch,
            highest_generation=self.highest_generation,
            running=running,
            spare_store=self.spare,
            health=self.health,
            boot_id=self.boot,
        )

    # --- inside

    async def _run(self) -> None:
        while True:
            address = self._address()
            if address is not None:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
                    await self._session(address)
            self._drop()
            await asyncio.sleep(0.02)

    async def _session(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port), limit=wire.MAX_MESSAGE_BYTES)
        self._writer.write(self.written(wire.encode(self.hello())))
        beats = asyncio.create_task(self._beats())
        try:
            while line := await self._reader.readline():
                if known := self.understood(line):
                    self._got(wire.decode(known, wire.ToAgent))
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)

    async def _beats(self) -> None:
        seq = 0
        while True:
            await asyncio.sleep(0.1)
            seq += 1
            self.send(wire.Beat(seq=seq, generation=self.generation if self.live else 0, progress=self.words(), spare_store=self.spare))

    def words(self) -> tuple[wire.RankProgress, ...]:
        """Progress words of live workers."""
        if not self.live or not self.step:
            return ()
        return tuple(
            wire.RankProgress(rank=rank, started_step=self.step + 1, applied_step=self.step, phase="step", age_seconds=0.1)
            for rank in self.ranks
        )

    def _got(self, message: Any) -> None:
        self.received.append(message)
        match message:
            case wire.Welcome():
                self.highest_epoch = max(self.highest_epoch, message.epoch)
                self.welcomed.set()
            case wire.Refused():
                self.refused.append(message.reason)
            case wire.StartGeneration():
                self._started(message)
            case wire.StopGeneration():
                if self.order is not None and self.order.spec.generation <= message.generation and self.live:
                    self.exit_all(signal=9, torn_down=True)
                self.send(wire.GenerationPhase(job=message.job, generation=message.generation, phase="stopped"))
            case wire.ProbePeers():
                self.send(wire.PeersProbed(job=message.job, generation=message.generation, reached=tuple(message.peers)))
            case wire.ReleaseNode():
                self.released = True
            case _:
                pass

    def _started(self, message: wire.StartGeneration) -> None:
        self.highest_epoch = max(self.highest_epoch, message.epoch)
        self.highest_generation = max(self.highest_generation, message.spec.generation)
        self.order, self.exits, self.step = message, {}, 0
        self.live = True
        self._spares += 1
        if self.answer_starts:
            for name in ("fenced", "stopped", "started", "rendezvous", "restored"):
                self.phase(name)

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        self.welcomed.clear()
