"""Steps and saves of undisturbed training in closed form: nothing has to happen for time to pass."""

from __future__ import annotations

import msgspec


class Pace(msgspec.Struct):
    """Training from `start`, where step `base` was complete, with a save after every `every` steps (0: none).

    A save holds training up for `stall` seconds after its step; the step itself takes `seconds`.
    """

    start: float
    base: int
    seconds: float
    stall: float = 0.0
    every: int = 0
    next_save: int = 0
    """The next step after which a save is due, > base; 0: none."""

    def saves_before(self, step: int) -> int:
        """Saves after steps in (base, step)."""
        if self.every < 1 or self.next_save < 1 or step <= self.next_save:
            return 0
        return (step - 1 - self.next_save) // self.every + 1

    def done_at(self, step: int) -> float:
        """When `step` is complete."""
        return self.start + (step - self.base) * self.seconds + self.saves_before(step) * self.stall

    def completed(self, now: float) -> int:
        """The highest step that is complete at `now`."""
        average = self.seconds + (self.stall / self.every if self.every > 0 else 0.0)
        step = self.base + max(0, int((now - self.start) / average))
        while step > self.base and self.done_at(step) > now:
            step -= 1
        while self.done_at(step + 1) <= now:
            step += 1
        return step

    def stalls_until(self, now: float) -> float:
        """Seconds of `start`..`now` in which a save held training up."""
        step = self.completed(now)
        whole = self.saves_before(step) * self.stall
        if self.is_save(step):
            whole += min(self.stall, max(0.0, now - self.done_at(step)))
        return whole

    def is_save(self, step: int) -> bool:
        """Is a save taken after this step?"""
        return self.every > 0 and self.next_save > 0 and step >= self.next_save and (step - self.next_save) % self.every == 0

    def saves(self, after: int, until: float) -> list[tuple[int, float]]:
        """(step, when its snapshot is complete) of saves after steps > `after` whose snapshot is complete by `until`."""
        if self.every < 1 or self.next_save < 1:
            return []
        step = self.next_save
        if after >= step:
            step += ((after - step) // self.every + 1) * self.every
        found: list[tuple[int, float]] = []
        while (snapshot := self.done_at(step) + self.stall) <= until:
            found.append((step, snapshot))
            step += self.every
        return found


class Paces:
    """Training whose rhythm changes at step boundaries: each pace holds up to the base of the next one."""

    def __init__(self, first: Pace) -> None:
        self._list = [first]

    @property
    def last(self) -> Pace:
        """The newest, which may begin in the future."""
        return self._list[-1]

    def change(self, now: float, *, lag: int, every: int, save: bool) -> tuple[int, float, bool]:
        """Another rhythm from a boundary on that is `lag` steps after the next one.

        Args:
            save: take a save there whatever the rhythm says.

        Returns:
            (boundary step, when training goes on there, whether a save is taken there).
        """
        pace = self.last
        boundary = max(pace.completed(max(now, pace.start)) + 1 + lag, pace.base + 1)
        saved = save or pace.is_save(boundary)
        start = pace.done_at(boundary) + (pace.stall if saved else 0.0)
        following = 0
        if every > 0:
            missed = boundary if saved else self._last_save(pace, boundary)
            following = max(boundary + 1, missed + every)
        self._list.append(
            Pace(start=start, base=boundary, seconds=pace.seconds, stall=pace.stall, every=every, next_save=following),
        )
        return boundary, start, saved

    def _last_save(self, pace: Pace, step: int) -> int:
        number = pace.saves_before(step)
        return pace.next_save + (number - 1) * pace.every if number else max(0, pace.next_save - pace.every)

    def _parts(self) -> list[tuple[Pace, Pace | None]]:
        following: list[Pace | None] = [*self._list[1:], None]
        return list(zip(self._list, following, strict=True))

    def completed(self, now: float) -> int:
        """The highest step that is complete at `now`."""
        for pace, following in reversed(self._parts()):
            if now >= pace.start:
                step = pace.completed(now)
                return step if following is None else min(step, following.base)
        return self._list[0].base

    def done_at(self, step: int) -> float:
        """When a step is complete."""
        for pace in reversed(self._list):
            if step > pace.base:
                return pace.done_at(step)
        return self._list[0].start

    def stalls_until(self, now: float) -> float:
        """Seconds up to `now` in which a save held training up."""
        whole = 0.0
        for pace, following in self._parts():
            if now < pace.start:
                break
            if following is None:
                return whole + pace.stalls_until(now)
            ended = pace.done_at(following.base)
            if now < ended:
                return whole + pace.stalls_until(now)
            whole += pace.saves_before(following.base) * pace.stall + min(now, following.start) - ended
        return whole

    def saves(self, after: int, until: float) -> list[tuple[int, float]]:
        """(step, when its snapshot is complete) of saves of the rhythm after steps > `after`, complete by `until`.

        Saves at the boundary of a change are known to whoever asked for it.
        """
        found: list[tuple[int, float]] = []
        for pace, following in self._parts():
            found += [(step, at) for step, at in pace.saves(max(after, pace.base), until) if following is None or step < following.base]
        return found
