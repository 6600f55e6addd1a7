"""The failure detector at the edge: a mutable table by this host's monotonic clock. Only its state changes become events."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core.hang import STOPPED

_LAG_FACTOR = 4.0
"""Looks that come later than this many periods mean that we stood still, not that everybody else fell silent."""
_MOST_LAG_SECONDS = 0.4
"""And so do those that come later than this."""
_LOOKS_A_SILENCE = 8
_MOST_LOOK_SECONDS = 0.25
_LATE_SECONDS = 0.1
"""After the instant at which who is late with others is silent as well."""
_GRACE_SHARE = 0.15
"""After a pause of our own nobody is silent before this share of the limit has passed."""
_IDLE_PHASES = ("", "start", "finished")
"""A word that was never written, or is done, says nothing about progress."""


class _Seen:
    __slots__ = ("heard_at", "silent", "words")

    def __init__(self, heard_at: float) -> None:
        self.heard_at = heard_at
        self.silent = False
        self.words: tuple[tuple[int, int, int, str], ...] = ()


class Silence:
    """Last beats of connected nodes. Times are the receiver's own clock, in seconds."""

    def __init__(self, *, silence_seconds: float, look_seconds: float) -> None:
        self._silence = silence_seconds
        self._look = look_seconds
        self._seen: dict[str, _Seen] = {}
        self._looked_at: float | None = None
        self.due_at = math.inf
        """When the limit of the node that was heard longest ago is over, as of the last look."""

    def connected(self, node: str, now: float) -> None:
        """A node greeted us."""
        self._seen[node] = _Seen(now)

    def disconnected(self, node: str) -> None:
        """Its connection closed: that is an event of its own."""
        self._seen.pop(node, None)

    def heard(self, node: str, now: float) -> e.NodeHeard | None:
        """Any message counts as a sign of life."""
        seen = self._seen.get(node)
        if seen is None:
            return None
        seen.heard_at = now
        if not seen.silent:
            return None
        seen.silent = False
        return e.NodeHeard(at=now, node=node)

    def look(self, now: float) -> list[e.NodeSilent]:
        """Nodes that fell silent since the last look. The time of a pause of our own is held against nobody, and what arrived
        meanwhile gets time to be read: a busy observer sees later, and one that pauses again and again sees all the same.
        """
        late = 0.0 if self._looked_at is None else now - self._looked_at - self._look
        self._looked_at = now
        if late > min(_LAG_FACTOR * self._look, _MOST_LAG_SECONDS):
            least = now - self._silence * (1.0 - _GRACE_SHARE)
            for seen in self._seen.values():
                seen.heard_at = min(now, max(seen.heard_at + late, least))
            return []
        found: list[e.NodeSilent] = []
        oldest = math.inf
        for node, seen in self._seen.items():
            if seen.silent:
                continue
            if now >= seen.heard_at + self._silence:
                seen.silent = True
                found.append(e.NodeSilent(at=now, node=node, last_heard_at=seen.heard_at))
            elif seen.heard_at < oldest:
                oldest = seen.heard_at
        self.due_at = oldest + self._silence
        return self._with_late(found, now) if found else []

    def _with_late(self, found: list[e.NodeSilent], now: float) -> list[e.NodeSilent]:
        """Hosts that lose power together fall silent within one beat of each other: tell with the first who may follow."""
        late = {node: seen.heard_at for node, seen in self._seen.items() if not seen.silent and now - seen.heard_at >= self._silence / 2}
        if not late:
            return found
        until = max(late.values()) + self._silence + min(self._look, _LATE_SECONDS)
        return [msgspec.structs.replace(found[0], late=tuple(late), late_until=until), *found[1:]]

    def is_silent(self, node: str) -> bool:
        """True for a node that is connected and silent."""
        seen = self._seen.get(node)
        return seen is not None and seen.silent


class Stall(msgspec.Struct):
    """Progress words of one generation: when the last of them changed. Dropped with its generation."""

    job: str
    generation: int
    changed_at: float
    ranks: dict[int, wire.RankProgress] = {}
    num_in: dict[str, int] = {}
    """{phase: number of ranks in it}: looked at ten times a second, so it is counted and not collected."""
    seen_at: dict[int, float] = {}
    stalled: bool = False
    ever: bool = False
    """True once any word was written: a script that does not know Regrow never writes one."""
    limit_seconds: float = math.inf
    """As of the last look."""

    def words(self, progress: tuple[wire.RankProgress, ...], now: float) -> e.ProgressResumed | None:
        """Take a beat's words."""
        ages: list[float] = []
        for word in progress:
            known = self.ranks.get(word.rank)
            if known is None or (known.started_step, known.applied_step) != (word.started_step, word.applied_step):
                ages.append(word.age_seconds)
            elif known.phase != word.phase and word.phase not in STOPPED:
                # A process that is found not to run is the opposite of progress; one that runs again has not written yet.
                ages.append(0.0 if known.phase in STOPPED else word.age_seconds)
            if known is None or known.phase != word.phase:
                self._enter(word.phase, known.phase if known is not None else None)
            self.ranks[word.rank] = word
            self.seen_at[word.rank] = now
        return self.moved(now, ago_seconds=min(ages)) if ages else None

    def _enter(self, phase: str, before: str | None) -> None:
        self.ever = self.ever or phase not in _IDLE_PHASES
        self.num_in[phase] = self.num_in.get(phase, 0) + 1
        if before is not None:
            self.num_in[before] -= 1
            if not self.num_in[before]:
                del self.num_in[before]

    @property
    def due_at(self) -> float:
        """When the limit is over if nothing moves."""
        return math.inf if self.stalled else self.changed_at + self.limit_seconds

    @property
    def stopped(self) -> bool:
        """Some worker's process does not run."""
        return any(phase in self.num_in for phase in STOPPED)

    @property
    def phases(self) -> frozenset[str]:
        """What the ranks are doing."""
        return frozenset(self.num_in)

    def moved(self, now: float, *, ago_seconds: float = 0.0) -> e.ProgressResumed | None:
        """Something moved, and its agent saw that so long ago: beats come at intervals, and the limit counts from the change."""
        self.changed_at = max(self.changed_at, now - max(0.0, ago_seconds))
        if not self.stalled:
            return None
        self.stalled = False
        return e.ProgressResumed(at=now, job=self.job, generation=self.generation)

    def look(self, now: float, limit_seconds: float) -> e.ProgressStalled | None:
        """Has nothing moved for too long? Said once until it moves again."""
        self.limit_seconds = limit_seconds
        if not self.ever or now < self.due_at:
            return None
        if all(phase in _IDLE_PHASES for phase in self.num_in):
            return None
        self.stalled = True
        ranks = tuple(
            msgspec.structs.replace(word, age_seconds=word.age_seconds + now - self.seen_at[rank])
            for rank, word in sorted(self.ranks.items())
        )
        return e.ProgressStalled(
            at=now, job=self.job, generation=self.generation, since=self.changed_at, limit_seconds=limit_seconds, ranks=ranks
        )


def look_seconds(silence_seconds: float) -> float:
    """Between two looks at who is silent or stalled. A limit that is over is looked at then (`next_look`): the period is there for pauses of
    our own, which are held against nobody, and for what has no limit."""
    return min(_MOST_LOOK_SECONDS, silence_seconds / _LOOKS_A_SILENCE)


def next_look(now: float, period_seconds: float, due: Iterable[float]) -> float:
    """After the period, or sooner when a limit is over before: a verdict is not late by the time between two looks."""
    return min([now + period_seconds, *(at for at in due if at > now)])
