"""Stub agents for benchmarks/scale.py: many nodes in one process, each with its own TLS connection and its own lease in etcd.

They speak the real protocol (regrow.wire): greet, beat twice a second with the progress words of all their ranks, pass the
phases of a start, report steps. Commands come as JSON lines on standard input, answers leave as JSON lines on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from regrow import wire
from regrow.store.base import Lease, Store, StoreError
from regrow.store.open import open_store

BEAT_SECONDS = 0.5
_SLICES = 10
_HANDSHAKES = 32
"""TLS handshakes under way at once in one process."""
_BACKOFF_SECONDS = (0.05, 1.0)
_REFUSED_SECONDS = (0.5, 8.0)
"""As regrow.agent.beat does it: refused by one that does not lead, a node waits for the next leader record, or for so long."""
_PROBE_SECONDS = 2.5
"""As regrow.agent.reach: so long until a peer counts as not reached."""
_PHASES = ("fenced", "stopped", "started", "rendezvous", "restored")


class Stub:
    """One node."""

    def __init__(self, name: str, slots: int, gone: set[str]) -> None:
        self.name = name
        self.gone = gone
        """Hosts without power, of all processes: they answer nobody."""
        self.slots = slots
        self.number = 1
        self.order: wire.StartGeneration | None = None
        self.live = False
        self.lost = False
        """Its host is gone: nothing is sent, nothing is answered."""
        self.step = 0
        self.spares = 0
        self.highest_epoch = 0
        self.highest_generation = 0
        self.welcomed = False
        self.ordered_at = 0.0
        self.refused = False
        self.writer: asyncio.StreamWriter | None = None
        self.task: asyncio.Task[None] | None = None
        self.lease: Lease | None = None

    @property
    def spare(self) -> str:
        """A TCPStore that nobody has used."""
        return f"10.0.0.1:{20_000 + self.spares}/{self.name}"

    @property
    def generation(self) -> int:
        """Of the last order to start."""
        return self.order.spec.generation if self.order is not None else 0

    def send(self, message: msgspec.Struct) -> None:
        """To the supervisor, while the host is there."""
        if self.writer is not None and not self.lost:
            self.writer.write(wire.encode(message))

    def hello(self, cluster: str) -> wire.Hello:
        """What it says when it connects."""
        running = None
        if self.order is not None and self.live:
            running = wire.RunningGeneration(
                job=self.order.spec.job, epoch=self.order.epoch, generation=self.generation, workers=self.order.workers
            )
        return wire.Hello(
            cluster=cluster,
            node=self.name,
            incarnation=f"{self.name}-{self.number}",
            address="10.0.0.1",
            peer_address="10.0.0.1:7",
            slots=self.slots,
            devices=tuple(wire.Device(uuid=f"GPU-{self.name}-{index}", index=index) for index in range(self.slots)),
            hardware_id=f"chassis-{self.name}",
            highest_epoch=self.highest_epoch,
            highest_generation=self.highest_generation,
            running=running,
            spare_store=self.spare,
            health=wire.HealthVerdict(state="healthy"),
            boot_id=f"boot-{self.number}",
        )

    def beat(self, seq: int) -> None:
        """A sign of life with the words of all ranks."""
        words: tuple[wire.RankProgress, ...] = ()
        if self.live and self.order is not None:
            words = tuple(
                wire.RankProgress(
                    rank=worker.rank,
                    started_step=self.step + 1,
                    applied_step=self.step,
                    phase="step" if self.step else "start",
                    age_seconds=0.1,
                )
                for worker in self.order.workers
            )
        self.send(wire.Beat(seq=seq, generation=self.generation if self.live else 0, progress=words, spare_store=self.spare))

    def got(self, message: Any) -> None:
        """A line of the supervisor."""
        match message:
            case wire.Welcome():
                self.highest_epoch = max(self.highest_epoch, message.epoch)
                self.welcomed, self.refused = True, False
            case wire.Refused():
                self.refused = True
            case wire.StartGeneration():
                self._started(message)
            case wire.ProbePeers():
                unreached = self.gone.intersection(message.peers)
                answer = wire.PeersProbed(
                    job=message.job,
                    generation=message.generation,
                    reached=tuple(peer for peer in message.peers if peer not in unreached),
                    unreached=tuple(unreached),
                )
                asyncio.get_running_loop().call_later(_PROBE_SECONDS if unreached else 0.0, self.send, answer)
            case wire.StopGeneration():
                self.live = self.live and self.generation > message.generation
                self.send(wire.GenerationPhase(job=message.job, generation=message.generation, phase="stopped"))
            case _:
                pass

    def _started(self, order: wire.StartGeneration) -> None:
        self.highest_epoch = max(self.highest_epoch, order.epoch)
        self.highest_generation = max(self.highest_generation, order.spec.generation)
        self.order, self.live = order, True
        self.step = order.spec.restore.step if order.spec.restore is not None else 0
        self.spares += 1
        self.ordered_at = time.time()
        for phase in _PHASES:
            self.send(wire.GenerationPhase(job=order.spec.job, generation=self.generation, phase=phase))

    def complete(self, step: int) -> None:
        """All its ranks applied a step."""
        if not self.live or self.order is None or step <= self.step:
            return
        self.step = step
        reports = tuple(
            wire.StepReport(
                generation=self.generation,
                rank=worker.rank,
                step=step,
                loss=1.0 if worker.rank == 0 else None,
                samples=step,
                step_seconds=1.0,
                compute_seconds=0.9,
            )
            for worker in self.order.workers
        )
        self.send(wire.NodeSteps(job=self.order.spec.job, generation=self.generation, step=step, reports=reports))


class Host:
    """All stubs of this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.gone: set[str] = set()
        names = [f"node{index:05d}" for index in range(options.first, options.first + options.count)]
        self.stubs = {name: Stub(name, options.slots, self.gone) for name in names}
        self.address = ""
        self.store: Store = open_store(options.store)
        self._tls = ssl.create_default_context(cafile=str(options.ca))
        self._tls.check_hostname = False
        self._gate = asyncio.Semaphore(_HANDSHAKES)
        self.failed_leases = 0
        self._known = asyncio.Event()
        self._changed = asyncio.Event()

    async def find_leader(self) -> None:
        """Until the store says who leads."""
        await self._known.wait()

    async def follow(self) -> None:
        """Who leads: each new record wakes all stubs that wait."""
        async with self.store.watch_prefix(f"/regrow/{self.options.cluster}/leader") as watch:
            async for batch in watch:
                for value in [item.value for item in batch.snapshot or ()] + [event.value for event in batch.events if event.kind == "put"]:
                    self.address = msgspec.json.decode(value, type=wire.LeaderRecord).beat_address
                    self._known.set()
                    self._changed.set()
                    self._changed = asyncio.Event()

    async def beats(self) -> None:
        """Every stub beats twice a second; a tenth of them at a time."""
        names = list(self.stubs)
        seq = 0
        while True:
            seq += 1
            for part in range(_SLICES):
                began = time.monotonic()
                for name in names[part::_SLICES]:
                    if self.stubs[name].welcomed:
                        self.stubs[name].beat(seq)
                await asyncio.sleep(max(0.0, BEAT_SECONDS / _SLICES - (time.monotonic() - began)))

    async def run(self, stub: Stub) -> None:
        """Connect, and again whenever the connection ends, while the host is there."""
        if self.options.leases and stub.lease is None:
            await self._register(stub)
        pause = _BACKOFF_SECONDS[0]
        while not stub.lost:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
                await self._session(stub)
            was_welcome, stub.welcomed = stub.welcomed, False
            if stub.writer is not None:
                stub.writer.transport.abort()
                stub.writer = None
            longest = _REFUSED_SECONDS[1] if stub.refused else _BACKOFF_SECONDS[1]
            pause = min(longest, _BACKOFF_SECONDS[0] if was_welcome else max(pause * 2, _REFUSED_SECONDS[0] if stub.refused else 0.0))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause * random.uniform(0.7, 1.3))

    async def _register(self, stub: Stub) -> None:
        record = wire.NodeRecord(
            node=stub.name, incarnation=f"{stub.name}-{stub.number}", address="10.0.0.1", peer_address="10.0.0.1:7", slots=stub.slots
        )
        try:
            async with self._gate:
                stub.lease = await self.store.lease(self.options.lease_seconds)
                await self.store.put(f"/regrow/{self.options.cluster}/nodes/{stub.name}", msgspec.json.encode(record), lease=stub.lease)
        except StoreError:
            self.failed_leases += 1

    async def _session(self, stub: Stub) -> None:
        host, _, port = self.address.rpartition(":")
        async with self._gate:
            reader, stub.writer = await asyncio.open_connection(host, int(port), limit=wire.MAX_MESSAGE_BYTES, ssl=self._tls)
            stub.writer.write(wire.encode(stub.hello(self.options.cluster)))
        while line := await reader.readline():
            if stub.lost:
                await asyncio.Event().wait()  # the host is gone: nobody reads
            stub.got(wire.decode(line, wire.ToAgent))

    # --- commands

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command of the benchmark."""
        chosen = [self.stubs[name] for name in command.get("nodes", ()) if name in self.stubs]
        match command["do"]:
            case "connect":
                await self.find_leader()
                for stub in self.stubs.values():
                    stub.task = asyncio.create_task(self.run(stub))
            case "step":
                for stub in self.stubs.values():
                    if not stub.lost:
                        stub.complete(command["step"])
            case "commit":
                self._commit(command["step"])
            case "lose":
                self.gone.update(command["nodes"] if command["silent"] else ())
                times = self._lose(chosen, silent=command["silent"])
                await asyncio.gather(*(stub.lease.close() for stub in chosen if stub.lease is not None))
                return {"at": times}
            case "peers":
                self._peers(chosen)
            case "return":
                self.gone.difference_update(command["nodes"])
                for stub in chosen:
                    await _end(stub)
                    stub.lost, stub.live, stub.order, stub.lease, stub.number = False, False, None, None, stub.number + 1
                    stub.task = asyncio.create_task(self.run(stub))
            case "state":
                return self._state()
            case other:
                raise ValueError(other)
        return {"ok": True}

    def _commit(self, step: int) -> None:
        """The committing agent of the current generation, if it is here, says that a checkpoint is committed."""
        for stub in self.stubs.values():
            if stub.live and not stub.lost and stub.order is not None and stub.order.spec.committing_node == stub.name:
                directory = f"/checkpoints/step-{step:012d}-g{stub.generation}"
                stub.send(
                    wire.CheckpointChanged(
                        job=stub.order.spec.job,
                        generation=stub.generation,
                        step=step,
                        state="committed",
                        directory=directory,
                        record_digest=f"{step:x}",
                        samples=step,
                    )
                )

    def _lose(self, chosen: list[Stub], *, silent: bool) -> dict[str, float]:
        """A host loses power (nothing closes), or its processes are killed (the kernel closes its connections)."""
        times: dict[str, float] = {}
        for stub in chosen:
            stub.lost, stub.live, stub.welcomed = True, False, False
            times[stub.name] = time.time()
            if not silent and stub.writer is not None:
                stub.writer.transport.abort()
        return times

    def _peers(self, chosen: list[Stub]) -> None:
        """Workers whose peer is gone end with an error."""
        for stub in chosen:
            if stub.order is None or not stub.live:
                continue
            worker = stub.order.workers[0]
            found = wire.WorkerExit(
                rank=worker.rank,
                local_rank=0,
                pid=1,
                exit_code=1,
                error="RuntimeError: NCCL error: remote process exited",
                last_step=stub.step,
            )
            stub.send(wire.WorkersExited(job=stub.order.spec.job, generation=stub.generation, exits=(found,)))

    def _state(self) -> dict[str, Any]:
        running: dict[int, int] = {}
        for stub in self.stubs.values():
            if stub.live:
                running[stub.generation] = running.get(stub.generation, 0) + 1
        orders = [stub.order.spec for stub in self.stubs.values() if stub.live and stub.order is not None]
        newest = max(orders, key=lambda spec: spec.generation, default=None)
        return {
            "welcomed": sum(stub.welcomed for stub in self.stubs.values()),
            "running": running,
            "generation": newest.generation if newest is not None else 0,
            "members": len(newest.nodes) if newest is not None else 0,
            "restored": newest.restore.step if newest is not None and newest.restore is not None else 0,
            "last_order_at": max((stub.ordered_at for stub in self.stubs.values()), default=0.0),
            "failed_leases": self.failed_leases,
        }


async def _end(stub: Stub) -> None:
    """The host boots: what held the connection of its earlier life is gone. (Two tasks for one node would take each other's
    connection for ever, twenty TLS handshakes a second and node.)"""
    if stub.task is not None:
        stub.task.cancel()
        await asyncio.gather(stub.task, return_exceptions=True)
    if stub.writer is not None:
        stub.writer.transport.abort()
        stub.writer = None


async def main() -> None:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--ca", required=True, type=Path)
    parser.add_argument("--first", required=True, type=int)
    parser.add_argument("--count", required=True, type=int)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--leases", action="store_true")
    parser.add_argument("--lease-seconds", type=float, default=10.0)
    logging.basicConfig(level=logging.ERROR)
    host = Host(parser.parse_args())
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    beating = asyncio.create_task(host.beats())
    following = asyncio.create_task(host.follow())
    while line := await commands.readline():
        answer = await host.obey(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    tasks = [beating, following, *(stub.task for stub in host.stubs.values() if stub.task is not None)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await host.store.close()


if __name__ == "__main__":
    asyncio.run(main())
