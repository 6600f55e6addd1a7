"""Which rank holds the others up, and why, from what every rank looks like from outside. Pure.

The one that waits in a collective is a victim; the cause is the one that should be there and is not. Evidence, strongest
first: a process that is gone, stopped or stuck in the kernel; torch's own record of collectives; a rank that is behind in
steps; a rank that is somewhere else while the others wait; else all wait together, and the cause is elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from regrow.agent.health.flight import FlightFinding
from regrow.agent.health.stackview import Stack, group

Status = Literal["running", "hung", "unclear"]

_CAUSES = {
    "data": "it waits for data",
    "save": "it is in a checkpoint",
    "rendezvous": "it is still in the rendezvous",
    "lock": "it waits for a lock",
    "sleep": "it sleeps",
    "io": "it waits for input or output",
    "python": "it is in its own code",
    "unknown": "it has no Python stack",
    "collective": "it is in another collective",
}


_RECORDED = {
    "mismatch": "collective_mismatch",
    "behind": "collective_not_entered",
    "not_completed": "collective_not_completed",
    "gone": "process_unreachable",
}


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, looked at twice."""

    rank: int
    pid: int
    state: str
    """Letter of /proc/pid/stat, or `gone`."""
    wait_channel: str = ""
    stack: Stack = Stack()
    moving: bool = False
    """It was somewhere else at the second look, or published progress between them."""
    busy: bool = False
    """It used a core between them."""
    step: int | None = None
    phase: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a job. `cause` is one of a closed set of words."""

    status: Status
    cause: str
    ranks: tuple[int, ...] = ()
    """The odd ones; empty: none, or it cannot be told."""
    process_group: str = ""
    sequence: int = -1
    text: str


def judge(ranks: Sequence[RankView], *, world_size: int = 0, local_world_size: int = 0, findings: Sequence[FlightFinding] = ()) -> Verdict:
    """Name the odd rank. The order of `ranks` does not matter."""
    known = sorted(ranks, key=lambda one: one.rank)
    if not known:
        return Verdict(status="unclear", cause="no_ranks", text="there is no rank to look at")
    return (
        _not_running(known)
        or _missing(known, local_world_size)
        or _moving(known)
        or _recorded(known, findings)
        or _behind(known)
        or _elsewhere(known)
        or _together(known, world_size)
    )


def _not_running(known: Sequence[RankView]) -> Verdict | None:
    for letters, cause, words in (
        (("gone", "Z", "X"), "process_gone", "its process ended while the others go on"),
        (("T", "t"), "process_stopped", "its process is stopped by a signal or a debugger"),
    ):
        odd = tuple(one.rank for one in known if one.state in letters)
        if odd:
            return Verdict(status="hung", cause=cause, ranks=odd, text=f"{_names(odd)}: {words}")
    stuck = tuple(one.rank for one in known if one.state == "D" and not one.moving and not one.busy)
    if stuck and len(stuck) < len(known):
        channel = next(one.wait_channel for one in known if one.rank == stuck[0])
        return Verdict(status="hung", cause="stuck_in_kernel", ranks=stuck, text=f"{_names(stuck)}: waits in the kernel ({channel or 'D'})")
    return None


def _missing(known: Sequence[RankView], local_world_size: int) -> Verdict | None:
    if not 0 < len(known) < local_world_size:
        return None
    seen = {one.rank for one in known}
    block = min(seen) // local_world_size * local_world_size
    odd = tuple(rank for rank in range(block, block + local_world_size) if rank not in seen)
    return Verdict(status="hung", cause="process_gone", ranks=odd, text=f"{_names(odd)}: has no process on this node")


def _moving(known: Sequence[RankView]) -> Verdict | None:
    """Everybody who does not wait for others is at work, and somebody got on."""
    free = [one for one in known if one.stack.kind != "collective"]
    if any(one.moving for one in known) and all(one.moving or one.busy for one in free):
        return Verdict(status="running", cause="none", text="ranks are at other places than a moment ago: the job is moving")
    if len(free) == len(known) and all(one.moving or one.busy for one in known):
        return Verdict(status="running", cause="none", text="all ranks compute")
    return None


def _recorded(known: Sequence[RankView], findings: Sequence[FlightFinding]) -> Verdict | None:
    here = {one.rank for one in known}
    for one in findings:
        if one.everywhere or here.intersection(one.ranks):
            return Verdict(
                status="hung",
                cause=_RECORDED[one.kind],
                ranks=one.ranks,
                process_group=one.group,
                sequence=one.sequence,
                text=f"{_names(one.ranks) if one.ranks else 'a rank of another host'} in process group {one.group!r}: {one.text}{_where(known, one.ranks)}",
            )
    return None


def _behind(known: Sequence[RankView]) -> Verdict | None:
    steps = {one.rank: one.step for one in known if one.step is not None}
    if len(steps) < len(known) or len(set(steps.values())) < 2:
        return None
    least = min(steps.values())
    odd = tuple(rank for rank, step in steps.items() if step == least)
    if 2 * len(odd) > len(known):
        return None
    return Verdict(
        status="hung",
        cause="behind",
        ranks=odd,
        text=f"{_names(odd)}: behind at step {least}, others at {max(steps.values())}{_where(known, odd)}",
    )


def _elsewhere(known: Sequence[RankView]) -> Verdict | None:
    waiting = [one for one in known if one.stack.kind == "collective"]
    others = [one for one in known if one.stack.kind != "collective"]
    if waiting and others:
        odd = tuple(one.rank for one in others)
        first = others[0]
        text = f"{_names(odd)}: {_CAUSES[first.stack.kind]} while {len(waiting)} wait in {waiting[0].stack.operation}{_where(known, odd)}"
        return Verdict(status="hung", cause=f"not_in_collective_{first.stack.kind}", ranks=odd, text=text)
    groups = group({one.rank: one.stack for one in known})
    if len(groups) > 1 and 2 * len(groups[0].ranks) > len(known):
        odd = tuple(rank for one in groups[1:] for rank in one.ranks)
        kind = groups[1].kind
        cause = "collective_mismatch" if kind == "collective" else f"elsewhere_{kind}"
        return Verdict(status="hung", cause=cause, ranks=odd, text=f"{_names(odd)}: {_CAUSES[kind]}{_where(known, odd)}")
    return None


def _together(known: Sequence[RankView], world_size: int) -> Verdict:
    first = known[0].stack
    if any(one.stack.kind != first.kind for one in known):
        return Verdict(status="unclear", cause="unclear", text="ranks stand at different places, and none of them alone")
    if first.kind == "collective" and len({one.stack.signature for one in known}) > 1:
        return Verdict(status="hung", cause="collective_mismatch", text="ranks wait in different collectives, and none of them alone")
    if first.kind == "collective" and len(known) < world_size:
        text = f"all {len(known)} ranks of this node wait in {first.operation}: the odd one is among the other {world_size - len(known)}"
        return Verdict(status="hung", cause="remote", text=text)
    if first.kind == "collective":
        return Verdict(
            status="hung",
            cause="network",
            text=f"all {len(known)} ranks wait in {first.operation}: the network, or a device, does not deliver",
        )
    text = f"all ranks: {_CAUSES[first.kind].replace('it ', 'each ', 1)}, at {first.place}"
    return Verdict(status="unclear" if first.kind in ("python", "unknown") else "hung", cause=f"all_{first.kind}", text=text)


def _names(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _where(known: Sequence[RankView], odd: Sequence[int]) -> str:
    place = next((one.stack.place for one in known if one.rank in odd and one.stack.frames), "")
    return f"; at {place}" if place else ""
