"""Workers that are left when the program is over: a deadlock at the end shows in no step and in no exit, only in idleness.

A process that still writes a model, uploads it or waits for a GPU uses CPU time; one that waits for a lock that nobody will
release uses none.
"""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core.symptoms import finished_ranks
from regrow.supervisor.core.view import GenerationView

_BUSY_SECONDS = 0.05
"""CPU time that counts as work. An idle interpreter's helper threads wake a few times a second, microseconds each."""
_FRESH_SECONDS = 3.0
"""What an agent said longer ago says nothing about now."""


class _Mark(msgspec.Struct):
    used: float
    busy_at: float
    heard_at: float


def _no_word(rank: int) -> wire.RankProgress:
    return wire.RankProgress(rank=rank, started_step=-1, applied_step=-1, phase="", age_seconds=0.0)


class Linger:
    """CPU time of the quiet workers of one generation. Times are the observer's clock, in seconds. Dropped with its generation."""

    def __init__(self, job: str, generation: int) -> None:
        self._job = job
        self.generation = generation
        self._marks: dict[int, _Mark] = {}
        self._told = False

    def used(self, cpu_seconds: dict[int, float], now: float) -> list[e.Event]:
        """Take a beat's CPU times. A worker that was called hung and works again takes that back."""
        busy = False
        for rank, used in cpu_seconds.items():
            mark = self._marks.get(rank)
            if mark is None or now - mark.heard_at > _FRESH_SECONDS:
                self._marks[rank] = _Mark(used, now, now)
                continue
            mark.heard_at = now
            if used - mark.used > _BUSY_SECONDS:
                mark.used, mark.busy_at, busy = used, now, True
        if not busy or not self._told:
            return []
        self._told = False
        return [e.ProgressResumed(at=now, job=self._job, generation=self.generation)]

    def look(
        self, generation: GenerationView, words: dict[int, wire.RankProgress], now: float, limit_seconds: float
    ) -> e.ProgressStalled | None:
        """Is the program over while the ranks that are left have been idle for the limit? Said once until one of them works.

        Over: a rank ended well, or every rank that is left has declared its end.
        """
        ended = finished_ranks(generation)
        declared = all(word.phase == "finished" for word in words.values()) if words else False
        if self._told or not (ended or declared):
            return None
        left = _living(generation)
        busy_at = self._busy_at(left, now)
        if busy_at is None:
            return None
        since = max([busy_at] + [generation.exits[rank].at for rank in ended])
        if now - since < limit_seconds:
            return None
        self._told = True
        ranks = tuple(words.get(rank, _no_word(rank)) for rank in sorted(left))
        return e.ProgressStalled(
            at=now, job=self._job, generation=self.generation, since=since, limit_seconds=limit_seconds, ranks=ranks, lingering=True
        )

    def idle(self, generation: GenerationView, now: float, limit_seconds: float) -> e.ProgressStalled | None:
        """Did no rank of a script that reports nothing use CPU time for the limit? Said once until one of them works.

        Ranks that wait in gloo, in a lock, for data or in a stopped process use none; NCCL's waiting is busy and is not seen.
        """
        left = _living(generation)
        since = self._busy_at(left, now)
        if self._told or since is None or now - since < limit_seconds:
            return None
        self._told = True
        ranks = tuple(_no_word(rank) for rank in sorted(left))
        return e.ProgressStalled(at=now, job=self._job, generation=self.generation, since=since, limit_seconds=limit_seconds, ranks=ranks)

    def _busy_at(self, ranks: list[int], now: float) -> float | None:
        """When one of them last used CPU time; None: not known of all of them."""
        marks = [self._marks.get(rank) for rank in ranks]
        known = [mark.busy_at for mark in marks if mark is not None and now - mark.heard_at <= _FRESH_SECONDS]
        return max(known) if known and len(known) == len(ranks) else None


def _living(generation: GenerationView) -> list[int]:
    return [worker.rank for member in generation.members.values() for worker in member.workers if worker.rank not in generation.exits]
