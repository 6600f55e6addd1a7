"""A leader in virtual time: the driver that term.py is in real time. It calls the production `turn` and nothing else decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from regrow.supervisor.core import events as e
from regrow.supervisor.core import rates
from regrow.supervisor.core.commits import committed
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.turn import Turn, turn
from regrow.supervisor.core.view import View
from regrow.supervisor.sim.loop import Entry
from regrow.supervisor.sim.models import JOB

if TYPE_CHECKING:
    from regrow.supervisor.sim.training import Run
    from regrow.supervisor.sim.world import World

TurnFunction = Callable[[View, tuple[e.Event, ...], Policy, float], Turn]
_change = msgspec.structs.replace


class Shared:
    """A map of the view whose union is a new object over the same storage: a copy of thousands of entries a fact is saved.

    Valid because `fold` never looks at the older map again; that it is a new object is what the core's memory of results
    goes by. For large clusters only; a test compares the journals with and without.
    """

    __slots__ = ("_items", "get", "items", "keys", "values")

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items
        self.get, self.items, self.keys, self.values = items.get, items.items, items.keys, items.values

    def __or__(self, other: dict[str, Any]) -> Shared:
        self._items.update(other)
        return Shared(self._items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Leader:
    """One term of one supervisor process."""

    def __init__(self, world: World, name: str, epoch: int, policy: Policy, decide: TurnFunction = turn) -> None:
        self.world = world
        self.name = name
        self.epoch = epoch
        self.view = View()
        self.alive = True
        self.paused = False
        self.connected: set[str] = set()
        self.silent: set[str] = set()
        self.known_revision = world.store.revision
        self.reason = ""
        """Of the last decision."""
        self.told_steps: dict[int, int] = {}
        """{generation: highest completed step that was told}."""
        self._policy = policy
        self._decide = decide
        self.stuck: list[Callable[[], None]] = []
        """What it was about to send when it stood still: sent late, with what it believed then."""
        self._queue: list[e.Event] = []
        self._flush_at: Entry | None = None
        self._wake: Entry | None = None
        self._log_index = len(world.store.log)

    def post(self, *events: e.Event) -> None:
        """Facts for the next turn, which is now."""
        if not self.alive:
            return
        self._queue.extend(events)
        if self._flush_at is None and not self.paused:
            self._flush_at = self.world.loop.at(self.world.now, self.flush)

    def note(self, *events: e.Event) -> None:
        """Facts that nothing follows from by themselves: told with the next turn, with their own instants."""
        if self.alive:
            self._queue.extend(events)

    def end(self) -> None:
        """The term is over, or the process is gone."""
        self.alive = False
        if self._wake is not None:
            self._wake.cancel()

    def resume(self) -> None:
        """A process that stood still goes on, with all that was due meanwhile."""
        self.paused = False
        if self.alive:
            stuck, self.stuck = self.stuck, []
            for call in stuck:
                self.world.loop.at(self.world.now, call)
            self._flush_at = self.world.loop.at(self.world.now, self.flush)

    def flush(self) -> None:
        """One turn, its journal entry, its checks, its effects."""
        self._flush_at = None
        if not self.alive or self.paused:
            return
        now = self.world.now
        events = (*self._catch_up(now), *self._queue)
        self._queue = []
        self._share()
        result = self._decide(self.view, events, self._policy, now)
        self.view = result.view
        self.reason = result.decision.reason
        self.world.journal.turn(now, self, events, result)
        if result.actions or not self.world.setup.lean:
            self.world.checkers.view(now, self.view)
        if self._wake is not None:
            self._wake.cancel()
        wake = result.decision.wake_at
        self._wake = self.world.loop.at(wake, self._woken) if wake is not None else None
        if result.actions:
            self.world.orders.dispatch(self, result)

    def _share(self) -> None:
        """Large clusters: the map of members is shared from its record on."""
        job = self.view.jobs.get(JOB)
        generation = job.generation if job is not None else None
        if job is None or generation is None or not self.world.setup.lean or isinstance(generation.members, Shared):
            return
        members: Any = Shared(dict(generation.members))
        self.view = _change(self.view, jobs=self.view.jobs | {JOB: _change(job, generation=_change(generation, members=members))})

    def _woken(self) -> None:
        self._wake = None
        self.flush()

    # --- what progressed since the last turn: told late, with the instants at which it happened

    def _catch_up(self, now: float) -> list[e.Event]:
        """Steps and commits that would have been events of their own. Nothing was decided meanwhile, so nothing differs."""
        self.world.life.settle()
        run = self.world.run
        found: list[e.Event] = []
        if run is not None and run.paces is not None and self.hears(run):
            found += self._steps(run, now)
        return found + self._commits()

    def hears(self, run: Run) -> bool:
        """Does any member of a run reach this leader?"""
        return any(name in self.connected and name not in self.silent and name not in self.world.cut for name in run.spec.nodes[:8]) or any(
            name in self.connected and name not in self.silent and name not in self.world.cut for name in run.members
        )

    def _steps(self, run: Run, now: float) -> list[e.Event]:
        done = run.completed(now)
        told = self.told_steps.get(run.number)
        if told is None:
            told = self.told_steps[run.number] = run.base if not self._adopted(run) else max(run.base, done - 1)
        if done <= told:
            return []
        self.told_steps[run.number] = done
        frontier = self.view.jobs[JOB].incidents[-1].frontier if JOB in self.view.jobs and self.view.jobs[JOB].incidents else 0
        marks = sorted({step for step in (told + 1 if told == run.base else 0, frontier + 1, done) if told < step <= done})
        found: list[e.Event] = []
        for step in marks:
            found.append(
                e.StepsCompleted(
                    at=run.step_done_at(step),
                    job=JOB,
                    generation=run.number,
                    step=step,
                    num_steps=step - told,
                    step_seconds=run.step_seconds,
                    samples=step * self.world.workload.micro_batches,
                )
            )
            told = step
        return found

    def _adopted(self, run: Run) -> bool:
        generation = self.view.jobs[JOB].generation if JOB in self.view.jobs else None
        return generation is not None and generation.number == run.number and generation.adopted

    def _commits(self) -> list[e.Event]:
        if JOB not in self.view.jobs or not self.connected:
            return []
        log = self.world.store.log[self._log_index :]
        self._log_index = len(self.world.store.log)
        known = set(self.view.jobs[JOB].checkpoints)
        there = self.world.store.checkpoints
        fresh = [commit for commit in log if commit.record is not None and there.get(commit.step) == commit.record]
        found: list[e.Event] = [committed(JOB, commit.record, commit.at) for commit in fresh if commit.record is not None]
        gone = sorted(step for step in known if step not in there)
        return found + [e.CheckpointGone(at=self.world.now, job=JOB, step=step) for step in gone]

    # --- the edge: detectors of this leader

    def watch_progress(self, run: Run, since: float | None = None) -> None:
        """The stall detector: looks when the limit would be reached if nothing moved from now on.

        Args:
            run: whose words.
            since: when this leader began to watch; default: the last change.
        """
        job = self.view.jobs.get(JOB)
        if job is None or not self.alive:
            return
        limit = rates.hang_limit(job, self._policy)
        changed = run.changed_at
        start = changed if since is None else since
        self.world.loop.at(start + limit + 0.1, lambda: self._look(run, changed, start, limit))

    def _look(self, run: Run, changed: float, since: float, limit: float) -> None:
        if not self.alive or self.world.run is not run or run.changed_at != changed or run.state in ("training", "over"):
            return
        self.post(
            e.ProgressStalled(
                at=self.world.now, job=JOB, generation=run.number, since=since, limit_seconds=limit, ranks=self.world.life.words(run)
            )
        )
