"""Where the wall time went: every second once, productive or lost in a named phase."""

from __future__ import annotations

import msgspec

from regrow.telemetry import PHASES

LOST = (*PHASES, "lost_work", "checkpoint", "shrunk", "waiting", "spares")
"""Names of lost time: recovery phases; steps computed again; stalls of saves; a smaller mesh; nothing can be formed; idle spares."""


class Piece(msgspec.Struct):
    """Completed steps of one generation that are still in the lineage."""

    first: int
    """Steps first + 1 .. last."""
    last: int
    seconds: float
    """Of one step on that generation's mesh."""


class Accounts:
    """Built while the simulation runs; `cursor` is the instant up to which all time is accounted for."""

    def __init__(self, full_seconds: float) -> None:
        self.cursor = 0.0
        self.lost: dict[str, float] = dict.fromkeys(LOST, 0.0)
        self.by_category: dict[str, float] = {}
        """Lost seconds since the last fault's category became the cause."""
        self.cause = "start"
        self.lineage: list[Piece] = []
        self.num_lost_steps = 0
        self._full = full_seconds

    def lose(self, phase: str, until: float) -> None:
        """The time up to `until` was spent in a phase of recovery."""
        seconds = until - self.cursor
        if seconds > 0:
            self._add(phase, seconds)
            self.cursor = until

    def trained(self, *, first: int, last: int, seconds: float, stalls: float, until: float) -> None:
        """Steps first + 1 .. last were completed up to `until`; what is neither step nor stall is an unfinished step."""
        spent = until - self.cursor
        self.cursor = max(self.cursor, until)
        if last > first:
            self.lineage.append(Piece(first, last, seconds))
        stalls = min(stalls, spent)
        self._add("checkpoint", stalls, cause="none")
        self._add("lost_work", max(0.0, spent - stalls - (last - first) * seconds))

    def rolled_back(self, step: int) -> None:
        """The job continues from `step`: later steps are lost work."""
        while self.lineage and self.lineage[-1].last > step:
            piece = self.lineage[-1]
            keep = max(piece.first, step)
            number = piece.last - keep
            self.num_lost_steps += number
            self._add("lost_work", number * piece.seconds)
            piece.last = keep
            if piece.last == piece.first:
                self.lineage.pop()

    def _add(self, phase: str, seconds: float, cause: str | None = None) -> None:
        self.lost[phase] += seconds
        name = cause if cause is not None else self.cause
        self.by_category[name] = self.by_category.get(name, 0.0) + seconds

    @property
    def num_steps(self) -> int:
        """Steps in the final lineage."""
        return sum(piece.last - piece.first for piece in self.lineage)

    def close(self, *, nodes: int, reserved: float) -> Summary:
        """The result over all time up to the cursor. `nodes` train at best, `reserved` are paid for, on average."""
        wall = self.cursor
        productive = self.num_steps * self._full
        stepping = sum((piece.last - piece.first) * piece.seconds for piece in self.lineage)
        share = nodes / reserved
        lost = {name: seconds * share for name, seconds in self.lost.items()}
        lost["shrunk"] = (stepping - productive) * share
        lost["spares"] = wall * (1.0 - share)
        return Summary(
            wall_seconds=wall,
            goodput=productive * share / wall if wall > 0 else 0.0,
            ettr=stepping / wall if wall > 0 else 0.0,
            lost_seconds=lost,
            lost_by_category={name: seconds * share for name, seconds in self.by_category.items()},
            num_steps=self.num_steps,
            num_lost_steps=self.num_lost_steps,
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in numbers. Lost seconds are whole-cluster seconds; with the productive ones they add up to the wall time."""

    wall_seconds: float
    goodput: float
    """Steps of the final lineage at the full mesh's pace / all reserved time, spares included."""
    ettr: float
    """Time of the steps of the final lineage / wall time."""
    lost_seconds: dict[str, float]
    lost_by_category: dict[str, float]
    num_steps: int
    num_lost_steps: int
