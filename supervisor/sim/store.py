"""The store and the storage of the simulated world: compare-and-swap as the real one has it, and what lies on disk."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core.records import LedgerRecord, QuarantineRecord
from regrow.supervisor.sim.checkers import Checkers


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint record that came or went, in the order of the store."""

    at: float
    step: int
    record: wire.CheckpointRecord | None
    """None: removed by retention."""


class SimStore:
    """What etcd holds. Every write compares what the real effects compare."""

    def __init__(self, checkers: Checkers) -> None:
        self.up = True
        self.epoch = 0
        """Term of the leader whose key is there."""
        self.generation: wire.GenerationSpec | None = None
        self.members: dict[str, tuple[wire.WorkerAssignment, ...]] = {}
        self.revision = 0
        """mod_revision of the generation record."""
        self.ledger: LedgerRecord | None = None
        self.quarantine: dict[str, QuarantineRecord] = {}
        self.checkpoints: dict[int, wire.CheckpointRecord] = {}
        self.log: list[Commit] = []
        self.up_since = 0.0
        self.corrupt: set[int] = set()
        """Steps whose state had diverged, whoever knows."""
        self.damaged: set[int] = set()
        """Steps whose bytes on storage are wrong, whoever knows."""
        self._checkers = checkers

    @property
    def unusable(self) -> set[int]:
        """Steps that nobody should go back to."""
        return self.corrupt | self.damaged

    def known_at(self, at: float) -> list[wire.CheckpointRecord]:
        """Records of now that were there at that instant. One that is committed between a decision and its record is lost work:
        the record compares the generation, not the checkpoints."""
        later = {commit.step for commit in self.log[-16:] if commit.record is not None and commit.at > at}
        return [record for step, record in self.checkpoints.items() if step not in later]

    def come_up(self, now: float) -> None:
        """It answers again."""
        self.up, self.up_since = True, now

    def new_term(self) -> int:
        """Election: the leader's key is there anew, with a higher epoch."""
        self.epoch += 1
        return self.epoch

    def record(self, now: float, epoch: int, known_revision: int, action: a.RecordGeneration) -> bool:
        """The transaction of effects.Effects._record_once: the leader's own key, and the revision that it knows."""
        if not self.holds(epoch, known_revision):
            return False
        self.revision += 1
        self.generation = action.spec
        self.members = action.members
        self.ledger = action.ledger
        for step, why in action.damaged.items():
            if step in self.checkpoints:
                self.checkpoints[step] = msgspec.structs.replace(self.checkpoints[step], damaged=why)
        self._checkers.recorded(now, action.spec, epoch, current_epoch=self.epoch)
        return True

    def holds(self, epoch: int, known_revision: int) -> bool:
        """The comparison of a generation record."""
        return epoch == self.epoch and known_revision == self.revision

    def fence_holds(self, revision: int) -> bool:
        """The comparison of a commit: the generation key has not changed since the generation started."""
        return revision == self.revision

    def commit(self, now: float, spec: wire.GenerationSpec, revision: int, step: int, keep: int, *, clean: bool) -> bool:
        """The committing agent's transaction, and its retention.

        Args:
            now: instant of the transaction.
            spec: the generation that saved.
            revision: of the generation record when it started.
            step: what is saved.
            keep: newest usable checkpoints that stay; the restore point and the newest verified one stay, too (agent/cleaning.py).
            clean: replicas agreed at this step: digests are compared where a save is taken.
        """
        if not self.fence_holds(revision):
            return False
        self._checkers.committed(now, spec, step, current=self.generation)
        record = wire.CheckpointRecord(
            step=step,
            generation=spec.generation,
            epoch=spec.epoch,
            directory=f"step-{step:012d}-g{spec.generation}",
            record_digest=f"{step:x}-{spec.generation:x}",
            evidence=("replica_consistent",) if clean else (),
        )
        self.corrupt.discard(step)
        self.damaged.discard(step)
        self.checkpoints[step] = record
        self.log.append(Commit(at=now, step=step, record=record))
        usable = sorted(found for found, item in self.checkpoints.items() if not item.damaged)
        verified = max((found for found in usable if self.checkpoints[found].evidence), default=-1)
        start = spec.restore.step if spec.restore is not None else -1
        for old in [found for found in usable[:-keep] if found not in (verified, start)]:
            del self.checkpoints[old]
            self.log.append(Commit(at=now, step=old, record=None))
        return True

    def amend(self, action: a.SetCheckpoint) -> None:
        """Evidence, or damage."""
        known = self.checkpoints.get(action.step)
        if known is not None:
            evidence = tuple(dict.fromkeys((*known.evidence, *action.evidence)))
            self.checkpoints[action.step] = msgspec.structs.replace(known, evidence=evidence, damaged=known.damaged or action.damaged)
