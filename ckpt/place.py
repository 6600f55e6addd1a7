"""Where in a job a process is, and what became of its saves."""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from regrow.ckpt.protocol import ProducerHello, Released
from regrow.wire import GenerationSpec, SaveReport

Outcome = Literal["snapshot", "skipped", "failed"]

log = logging.getLogger("regrow.ckpt.state")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the job this process is."""

    spec: GenerationSpec
    rank: int
    node: str
    local_ranks: tuple[int, ...]
    """All ranks of this node, this one included."""
    folder: str
    """The job's checkpoint folder, absolute."""
    node_file: bool = False
    """The ranks of this node share one file on storage."""

    def hello(self) -> ProducerHello:
        """What this process says first to the node's writer."""
        spec = self.spec
        return ProducerHello(
            job=spec.job,
            node=self.node,
            epoch=spec.epoch,
            generation=spec.generation,
            rank=self.rank,
            world_size=spec.world_size,
            local_ranks=self.local_ranks,
            folder=self.folder,
            node_file=self.node_file,
        )

    def report(self, step: int, outcome: Outcome, reason: str = "", stall_seconds: float = 0.0) -> SaveReport:
        """What became of a save of this rank, for its agent."""
        generation = self.spec.generation
        return SaveReport(generation=generation, rank=self.rank, step=step, outcome=outcome, stall_seconds=stall_seconds, reason=reason)


class SaveCounts(msgspec.Struct):
    """What became of the saves of this process. Seconds are of the newest one."""

    snapshots: int = 0
    skipped: int = 0
    failed: int = 0
    durable: int = 0
    remembered: int = 0
    """In memory, not written, as asked."""
    not_durable: int = 0
    stall_seconds: float = 0.0
    join_seconds: float = 0.0
    """How long the optimizer had to wait for the copy of the newest late snapshot."""
    write_seconds: float = 0.0
    memory_seconds: float = 0.0
    """From a snapshot that is not written until it was safe in memory: digests taken, and copied to the buddy where there is one."""
    last_reason: str = ""
    in_flight: int = 0
    """Handed over, and not heard of since."""

    def count(self, outcome: str, reason: str, stall_seconds: float) -> None:
        """A save has returned."""
        self.stall_seconds = stall_seconds
        if outcome == "snapshot":
            self.snapshots += 1
            return
        self.last_reason = reason
        if outcome == "skipped":
            self.skipped += 1
        else:
            self.failed += 1
        log.warning("save %s reason=%s", outcome, reason)

    def note(self, released: list[Released]) -> None:
        """Empty the list: an arena came back, and with it what became of its snapshot."""
        for one in released:
            self.in_flight = max(0, self.in_flight - 1)
            if one.outcome == "durable":
                self.durable += 1
                self.write_seconds = one.write_seconds
            elif one.outcome == "remembered":
                self.remembered += 1
                self.memory_seconds = one.write_seconds
            else:
                self.not_durable += 1
                self.last_reason = one.reason
                log.warning("save not durable step=%d reason=%s", one.step, one.reason)
        released.clear()

    def lost(self, why: str) -> None:
        """The writer is gone with what it had."""
        log.warning("writer lost snapshots_lost=%d error=%s", self.in_flight, why)
        self.not_durable += self.in_flight
        self.in_flight = 0
