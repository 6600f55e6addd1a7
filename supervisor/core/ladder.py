"""The recovery ladder: each rung with its expected lost work in GPU-seconds; the choice is a min() and says its numbers."""

from __future__ import annotations

import msgspec


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One way to go on."""

    name: str
    lost_gpu_seconds: float
    """Expected; infinite: not possible."""
    why: str


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice depends on. Times in seconds, worlds in workers."""

    world_before: int
    world_after: int
    """Workers of the best mesh that can be formed now; 0: none."""
    same_members: bool
    """All previous members can go on."""
    uses_spare: bool
    restart_seconds: float
    redo_seconds: float
    """Work since the restore point."""
    older_redo_seconds: float
    """Extra work when the newest checkpoint cannot be used; 0: it can."""
    wait_seconds: float
    """Expected time until the missing nodes are back by themselves; infinite: they are not expected."""
    horizon_seconds: float
    """How long a smaller mesh would last."""
    in_place_seconds: float = float("inf")
    """A restart in which the survivors keep their processes; infinite: not wanted for this job, or it has just failed."""


def climb(situation: Situation) -> tuple[Rung, tuple[Rung, ...]]:
    """The cheapest rung, and all of them in the ladder's order."""
    before, after = situation.world_before, situation.world_after
    redo = (situation.redo_seconds + situation.older_redo_seconds) * max(before, after)
    restart = situation.restart_seconds * max(before, after)
    never = float("inf")
    full = after >= before > 0
    waiting = never if situation.same_members else (situation.wait_seconds + situation.restart_seconds) * before + redo
    missing = max(0, before - after) * situation.horizon_seconds
    rungs = (
        Rung(name="wait", lost_gpu_seconds=waiting, why=f"{situation.wait_seconds:.0f} s until the node is back"),
        Rung(
            name="warm_restart",
            lost_gpu_seconds=restart + redo if situation.same_members and full and not situation.older_redo_seconds else never,
            why="same members, new processes",
        ),
        Rung(
            name="in_place",
            lost_gpu_seconds=situation.in_place_seconds * max(before, after) + redo
            if situation.same_members and full and not situation.older_redo_seconds
            else never,
            why="same members, survivors keep their processes",
        ),
        Rung(
            name="spare",
            lost_gpu_seconds=restart + redo if full and situation.uses_spare and not situation.older_redo_seconds else never,
            why="a spare takes the place",
        ),
        Rung(
            name="shrink",
            lost_gpu_seconds=restart + redo + missing if after > 0 and not situation.older_redo_seconds and not full else never,
            why=f"{after} of {before} workers for {situation.horizon_seconds:.0f} s",
        ),
        Rung(
            name="roll_back",
            lost_gpu_seconds=restart + redo + missing if after > 0 and situation.older_redo_seconds else never,
            why=f"{situation.older_redo_seconds:.0f} s more to compute again",
        ),
        Rung(name="park", lost_gpu_seconds=1e15 if after < 1 else never, why="nothing can be formed"),
    )
    return min(rungs, key=lambda rung: rung.lost_gpu_seconds), rungs


def explain(chosen: Rung, rungs: tuple[Rung, ...]) -> str:
    """The choice with the numbers of all rungs that were possible."""
    others = [rung for rung in rungs if rung.lost_gpu_seconds < float("inf") and rung is not chosen]
    text = f"{chosen.name} ({_number(chosen)}: {chosen.why})"
    return text + "".join(f" < {rung.name} ({_number(rung)})" for rung in sorted(others, key=lambda rung: rung.lost_gpu_seconds))


def _number(rung: Rung) -> str:
    return "nothing better" if rung.lost_gpu_seconds >= 1e15 else f"{rung.lost_gpu_seconds:.0f} GPU-s"
