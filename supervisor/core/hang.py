"""Which rank is the odd one when nothing moves. The rank that reports a timeout is usually a victim."""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from regrow import wire

STOPPED = ("stopped", "traced", "gone")
"""Phases that an agent reports when the process itself does not run (SIGSTOP, ptrace, D state, vanished)."""
_CLEARLY_OLDER_SECONDS = 0.5
_THREAD = re.compile(r"(?:Current thread|Thread) \S+")


class Odd(msgspec.Struct, frozen=True, kw_only=True):
    """The suspect; rank -1: cannot be told."""

    rank: int
    why: str


def odd_rank(ranks: tuple[wire.RankProgress, ...], stacks: dict[int, str]) -> Odd:
    """Name the rank that holds the others up, by the strongest evidence that singles one out.

    In this order: its process is stopped; it is behind in steps; it alone could not dump its stack; it alone is in another
    phase; its stack alone differs; its word is the oldest by a clear margin.
    """
    if not ranks:
        return Odd(rank=-1, why="no rank reports progress")
    stopped = [item.rank for item in ranks if item.phase in STOPPED]
    if stopped:
        return Odd(rank=stopped[0], why=f"its process does not run (ranks {stopped})" if len(stopped) > 1 else "its process does not run")
    if len(ranks) == 1:
        return Odd(rank=ranks[0].rank, why="the only rank")
    behind = _single_least({item.rank: (item.applied_step, item.started_step) for item in ranks})
    if behind is not None:
        item = next(item for item in ranks if item.rank == behind)
        return Odd(rank=behind, why=f"behind: started step {item.started_step}, applied {item.applied_step}")
    if stacks:
        silent = [item.rank for item in ranks if item.rank not in stacks]
        if len(silent) == 1:
            return Odd(rank=silent[0], why="it alone could not dump its stack")
    phase = _single_value({item.rank: item.phase for item in ranks})
    if phase is not None:
        return Odd(rank=phase[0], why=f"it alone is in phase {phase[1]!r}")
    place = _single_value({rank: _innermost(text) for rank, text in stacks.items()})
    if place is not None:
        return Odd(rank=place[0], why=f"it alone is at {place[1]!r}")
    oldest = sorted(ranks, key=lambda item: -item.age_seconds)
    if oldest[0].age_seconds - oldest[1].age_seconds > _CLEARLY_OLDER_SECONDS:
        return Odd(rank=oldest[0].rank, why=f"it stopped first, {oldest[0].age_seconds - oldest[1].age_seconds:.1f} s before the next")
    return Odd(rank=-1, why=f"{len(ranks)} ranks stopped at the same place")


def _single_least(values: dict[int, tuple[int, int]]) -> int | None:
    least = min(values.values())
    holders = [rank for rank, value in values.items() if value == least]
    return holders[0] if len(holders) == 1 and len(values) > 1 else None


def _single_value(values: dict[int, str]) -> tuple[int, str] | None:
    """The one rank whose value differs while all others (at least two) share theirs."""
    counts = Counter(values.values())
    if len(values) < 3 or len(counts) != 2:
        return None
    value, times = counts.most_common()[-1]
    return next((rank, value) for rank, other in values.items() if other == value) if times == 1 else None


def _innermost(stack: str) -> str:
    """The innermost frame of the thread that runs the program: the one that took the signal, else the main one, else the oldest (the last that
    faulthandler writes). The library's own threads stand at the same place in all ranks."""
    threads: list[tuple[str, list[str]]] = [("", [])]
    for line in map(str.strip, stack.splitlines()):
        if _THREAD.match(line):
            threads.append((line, []))
        elif line.startswith("File "):
            threads[-1][1].append(line)
    told = [(head, frames[0][:160]) for head, frames in threads if frames]
    own = [frame for head, frame in told if head.startswith("Current thread") or "MainThread" in head]
    return own[0] if own else told[-1][1] if told else ""
