"""One job on one cluster, followed to its end: what `regrow run` and `regrow demo` share."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any, NoReturn

from regrow import wire
from regrow.errors import OperationalError
from regrow.local.api import SupervisorClient
from regrow.local.live import LiveView

_SETTLE_SECONDS = 0.1
_STEADY_SECONDS = 10.0
"""Nothing happened for so long: the job is asked less often."""
_TABLE_SECONDS = 1.0
_PLAIN_SECONDS = 10.0
"""So seldom then, with and without a table on a terminal: what happens is heard at once, and training has this core, too."""
_ROUTINE = "steps_completed"
ENDED = ("done", "failed", "stopped")
FIRST_TOLD = 2
"""Void saves in a row: one by itself may have been overtaken by the next."""
DEGRADED = 3
"""Exit status of a job that is done, and whose last state is no checkpoint."""
INTERRUPTED = 130
"""Exit status after Ctrl-C: saved and stopped; the same command goes on from there."""


class Follower:
    """Keeps the newest document of a job and tells a view what happens."""

    def __init__(
        self, api: SupervisorClient, job: str, view: LiveView, *, period_seconds: float = 0.2, seldom_seconds: float = 0.0
    ) -> None:
        """`seldom_seconds`: between two looks while nothing happens but steps, for who waits for one; 0: as suits the view."""
        self.document: dict[str, Any] = {}
        self._api = api
        self._job = job
        self._view = view
        self._period_seconds = period_seconds
        self._seldom_seconds = seldom_seconds or (_TABLE_SECONDS if view.is_table else _PLAIN_SECONDS)
        self._told: dict[str, str] = {}
        self._told_void = 0
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()

    async def follow(self) -> dict[str, Any]:
        """Until the job ends; its last document. It is asked for every period; when nothing happens for a while, when something does."""
        hearing = asyncio.create_task(self._hear())
        following = asyncio.create_task(self._follow())
        try:
            await asyncio.wait((hearing, following), return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else hearing.result()
        finally:
            for task in (hearing, following):
                task.cancel()
            await asyncio.gather(hearing, following, return_exceptions=True)

    async def _hear(self) -> NoReturn:
        async for _ in self._api.events(job=self._job, limit=1, without=_ROUTINE):
            self._news.set()
        raise AssertionError("events do not end")

    async def _follow(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        known: tuple[Any, ...] = ()
        since = loop.time()
        while True:
            self._news.clear()
            self.document = await self._api.get(f"/v1/jobs/{self._job}")
            self._view.update(self.document)
            self._tell_incidents()
            self._tell_void_saves()
            async with self._changed:
                self._changed.notify_all()
            if self.document.get("state") in ENDED:
                return self.document
            now = (self.document.get("state"), self.document.get("generation"), len(self.document.get("incidents") or ()))
            if now != known:
                known, since = now, loop.time()
            await asyncio.sleep(self._period_seconds)
            if now[0] == "running" and loop.time() - since > _STEADY_SECONDS:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seldom_seconds - self._period_seconds):
                        await self._news.wait()

    async def until(self, condition: Any, what: str, limit_seconds: float) -> dict[str, Any]:
        """Wait until `condition(document)` holds.

        Raises:
            OperationalError: not within the limit, or the job ended before.
        """

        def reached() -> bool:
            return bool(self.document and (condition(self.document) or self.document.get("state") in ENDED))

        try:
            async with asyncio.timeout(limit_seconds), self._changed:
                await self._changed.wait_for(reached)
        except TimeoutError:
            raise OperationalError(
                f"did not see {what} within {limit_seconds:g} s", where=f"job {self._job}", hint="the logs are in the run folder"
            ) from None
        if not condition(self.document):
            outcome = self.document.get("outcome") or {}
            raise OperationalError(
                f"the job ended ({self.document.get('state')}: {outcome.get('reason', '')}) before {what}", where=f"job {self._job}"
            )
        return self.document

    def _tell_void_saves(self) -> None:
        """When saves in a row fail, and again each time that there are ten times as many."""
        void = (self.document.get("checkpoint") or {}).get("void") or {}
        count = int(void.get("count", 0))
        if count < FIRST_TOLD:
            self._told_void = 0
        elif count >= 10 * self._told_void:
            self._told_void = count
            self._view.note(f"no checkpoint: {count} saves in a row are void, the last of step {void['step']}: {void['reason']}", "red")

    def _tell_incidents(self) -> None:
        for incident in self.document.get("incidents", []):
            name = str(incident.get("id"))
            stage = "recovered" if incident.get("recovered") else "open"
            if self._told.get(name) == stage:
                continue
            if name not in self._told:
                self._view.note(f"incident {name}: {incident.get('kind')}: {incident.get('text')}", "yellow")
            self._told[name] = stage
            if stage == "recovered":
                seconds = incident.get("seconds")
                self._view.note(
                    f"incident {name}: recovered by {incident.get('rung')} in {seconds:.2f} s, first new step {incident.get('frontier', 0) + 1}",
                    "green",
                )


async def settled(api: SupervisorClient, document: dict[str, Any], limit_seconds: float) -> dict[str, Any]:
    """The document of a job that is done, once the save of its last step is committed or void; as it is then, after the limit.

    A job that saves nothing is not waited for.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_seconds):
            while _is_open(document):
                await asyncio.sleep(_SETTLE_SECONDS)
                document = await api.get(f"/v1/jobs/{document['job']}")
    return document


def _is_open(document: dict[str, Any]) -> bool:
    saved = document.get("checkpoint") or {}
    known = [step for step in (saved.get("step"), (saved.get("void") or {}).get("step")) if step is not None]
    return bool(known) and max(known) < int(document.get("step") or 0)


def lost_its_last_save(document: dict[str, Any]) -> bool:
    """Is the state of the last step no checkpoint?"""
    void = (document.get("checkpoint") or {}).get("void")
    return bool(void) and void["step"] >= int(document.get("step") or 0)


async def submit(api: SupervisorClient, spec: wire.JobSpec) -> None:
    """Hand the job to the supervisor; the same job again is fine."""
    await api.post("/v1/jobs", wire.encode(spec))


async def follow_with_signals(api: SupervisorClient, follower: Follower, job: str, view: LiveView) -> tuple[dict[str, Any], bool]:
    """Follow until the end. The first Ctrl-C or SIGTERM saves and stops, the second stops at once.

    Returns:
        (last document, whether it was interrupted)
    """
    loop = asyncio.get_running_loop()
    presses = 0
    tasks: set[asyncio.Task[Any]] = set()

    def interrupt() -> None:
        nonlocal presses
        presses += 1
        command = "save-and-stop" if presses == 1 else "abort"
        view.note("saving and stopping; once more to stop at once" if presses == 1 else "stopping at once", "yellow")
        task = loop.create_task(api.post(f"/v1/jobs/{job}/{command}"))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await follower.follow(), presses > 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
