"""Carrying out orders to actuators while a term lasts: the intent is in the store before anything is done, the outcome after it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from regrow.errors import RegrowError
from regrow.store.base import Comparison, Delete, Operation, Put, Store, StoreError
from regrow.supervisor.actuators import orders
from regrow.supervisor.actuators.port import Actuator, Call, LeftAlone, safe_reason
from regrow.supervisor.core.view import View
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import Keys

log = logging.getLogger("regrow.supervisor.actuators")

_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tenure:
    """A leader's term, as its actuators need it."""

    store: Store
    keys: Keys
    journal: Journal
    comparison: Comparison | None
    """Holds in the store as long as the term lasts."""
    epoch: int
    now: Callable[[], float]
    """Seconds, of this process's own clock."""
    look: Callable[[], View | None]
    """The view, once everything was loaded."""
    holds: Callable[[], bool]
    """This process still leads, by its own clock."""


class Actuation:
    """One actuator in one term."""

    def __init__(self, actuator: Actuator, tenure: Tenure, *, dry_run: bool, per_hour: int) -> None:
        """`per_hour`: at most so many orders within an hour."""
        self.actuator = actuator
        self.dry_run = dry_run
        self.per_hour = per_hour
        self.records: dict[str, orders.Record] = {}
        """Last order for each node."""
        self.held: tuple[orders.Wanted, ...] = ()
        """Nodes that wait for the rate limit."""
        self.paused = ""
        """Why nothing is ordered now; empty: it is."""
        self._tenure = tenure
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled, or until the term is over."""
        while True:
            try:
                await self._load()
                while self._tenure.holds():
                    await self._once()
                    await asyncio.sleep(_LOOK_SECONDS)
            except StoreError as error:
                log.warning("actuator=%s waits for the store: %s", self.actuator.name, error.what)
            if not self._tenure.holds():
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _load(self) -> None:
        prefix = self._tenure.keys.actuated(self.actuator.name, "")
        found: dict[str, orders.Record] = {}
        for item in await self._tenure.store.get_prefix(prefix):
            try:
                record = msgspec.json.decode(item.value, type=orders.Record)
            except msgspec.MsgspecError as error:
                log.error("key=%s is not readable: %s", item.key, error)  # noqa: TRY400  # foreign data, not a bug
                continue
            found[record.node] = record
        self.records = found

    async def _once(self) -> None:
        view = self._tenure.look()
        if view is None:
            return
        self.paused = "" if view.automation else "automation is off"
        wanted = orders.wanted_out(view)
        plan = orders.plan(wanted, self.records, now=self._tenure.now(), epoch=self._tenure.epoch, per_hour=self.per_hour)
        self.held = plan.held
        for want in plan.held:
            self._tell_once(want.node, f"held: {self.per_hour} nodes went out within the hour", "out", want.node, "held")
        for node in set(self._told) - set(wanted) - set(self.records):
            del self._told[node]
        if self.dry_run or self.paused:
            for record in plan.intents:
                why = "dry run" if self.dry_run else self.paused
                self._tell_once(
                    record.node, f"would: {self.actuator.preview(self._call(record))} ({why})", record.direction, record.id, "would"
                )
            return
        for record in plan.intents:
            if not await self._write(record):
                return
            self._tell(record, "ordered", record.reason)
            await self._do(record)
        for record in plan.again:
            await self._do(record)
        for node in plan.forget:
            await self._transact(Delete(self._tenure.keys.actuated(self.actuator.name, node)))
            self.records.pop(node, None)

    async def _do(self, record: orders.Record) -> None:
        """One attempt, then its outcome. A term that is over does nothing more: the next leader finds the intent."""
        if not self._tenure.holds():
            return
        try:
            outcome = await self.actuator.act(self._call(record))
        except RegrowError as error:
            state: orders.State = "failed"
            detail = " ".join(str(error).split())
        else:
            state = "left" if isinstance(outcome, LeftAlone) else "done"
            detail = outcome.detail
        changed = orders.attempted(record, now=self._tenure.now(), state=state, detail=detail)
        self.records[record.node] = changed
        if state != "failed" or record.state != "failed" or detail[:500] != record.detail:
            self._tell(changed, state, detail)
        await self._write(changed)

    def _call(self, record: orders.Record) -> Call:
        reason = safe_reason(record.reason)
        return Call(node=record.node, direction=record.direction, reason=reason, hardware=record.hardware, id=record.id)

    async def _write(self, record: orders.Record) -> bool:
        """Whether the store has it. It has not when the term is over."""
        if not await self._transact(Put(self._tenure.keys.actuated(self.actuator.name, record.node), msgspec.json.encode(record))):
            log.warning("actuator=%s node=%s: this term is over", self.actuator.name, record.node)
            return False
        self.records[record.node] = record
        return True

    async def _transact(self, operation: Operation) -> bool:
        compare = [self._tenure.comparison] if self._tenure.comparison else []
        return (await self._tenure.store.transaction(compare, [operation])).succeeded

    # --- what people see

    def ended(self, task: asyncio.Task[None]) -> None:
        """The task of `run` is over. A bug in an actuator stops that actuator, not the supervisor, and is shown."""
        if not task.cancelled() and task.exception() is not None:
            self.paused = f"stopped by a bug: {task.exception()!r}"[:300]
            log.error("actuator=%s %s", self.actuator.name, self.paused, exc_info=task.exception())

    def _tell(self, record: orders.Record, outcome: str, detail: str) -> None:
        self._say(record.node, record.direction, outcome, detail, record.num_attempts, record.id)

    def _tell_once(self, node: str, text: str, direction: str, key: str, outcome: str) -> None:
        if self._told.get(node) != f"{outcome} {key}":
            self._told[node] = f"{outcome} {key}"
            self._say(node, direction, outcome, text, 0, key)

    def _say(self, node: str, direction: str, outcome: str, detail: str, num_attempts: int, order: str) -> None:
        name = self.actuator.name
        text = f"{name} {direction} {node}: {outcome}{f' at attempt {num_attempts}' if outcome == 'failed' else ''}: {detail}"
        log.log(logging.WARNING if outcome in ("failed", "held") else logging.INFO, "actuator=%s", text)
        data = {"actuator": name, "direction": direction, "outcome": outcome, "detail": detail, "attempts": num_attempts, "order": order}
        self._tenure.journal.write(epoch=self._tenure.epoch, at=self._tenure.now(), kind="actuator", node=node, text=text, data=data)

    def document(self) -> dict[str, Any]:
        """For the API: what was ordered and what became of it."""
        return {
            "actuator": self.actuator.name,
            "mode": "dry-run" if self.dry_run else "on",
            "paused": self.paused,
            "per_hour": self.per_hour,
            "orders": [msgspec.to_builtins(record) for _, record in sorted(self.records.items())],
            "held": [msgspec.to_builtins(want) for want in self.held],
        }

    def counts(self) -> dict[str, int]:
        """Orders by state, for /metrics."""
        found = {"open": 0, "failed": 0, "done": 0, "held": len(self.held)}
        for record in self.records.values():
            found[{"intended": "open", "failed": "failed"}.get(record.state, "done")] += 1
        return found
